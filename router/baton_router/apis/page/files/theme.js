"use strict";

/* Before the body is drawn: the colors that were chosen here before, if they were. */
function chosenTheme() {
  try {
    return localStorage.getItem("baton-theme");
  } catch {
    return null; // a browser that stores nothing
  }
}

function isDark() {
  const theme = document.documentElement.dataset.theme;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function chooseTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("baton-theme", theme);
  } catch {
    // it lasts until the page is left
  }
}

if (chosenTheme()) document.documentElement.dataset.theme = chosenTheme();
