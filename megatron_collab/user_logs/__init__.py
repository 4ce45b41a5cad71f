"""Makes tasks and their users from a product's conversations, and measures how real simulated users are."""
