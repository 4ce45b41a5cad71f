// Light, dark, or as the system has it. The choice is kept in this browser.

const THEMES = ["system", "light", "dark"];
const KEY = "megatron-collab-theme";

export function setUpTheme(button) {
  let theme = THEMES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : THEMES[0];
  const apply = () => {
    document.documentElement.dataset.theme = theme;
    button.textContent = `Theme: ${theme}`;
  };
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    localStorage.setItem(KEY, theme);
    apply();
  });
  apply();
}
