"""Published comparisons made again: the assistants of a study, trained and evaluated one after the other."""
