"use strict";

const find = (id) => document.getElementById(id);

/** An element with a class and a text; whatever comes from a server or a user goes in as text only. */
function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

function button(text, onClick, className = "plain") {
  const element = make("button", className, text);
  element.type = "button";
  element.addEventListener("click", onClick);
  return element;
}

/** Copies a text; over plain HTTP browsers have no clipboard but that of the selection. */
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}

/** A button that copies what `text` returns then. */
function copyButton(label, text) {
  const element = button(label, async () => {
    try {
      await copyText(text());
      element.textContent = "Copied";
    } catch {
      element.textContent = "Not permitted";
    }
    announce(element.textContent);
    element.focus();
    setTimeout(() => { element.textContent = label; }, 1500);
  });
  return element;
}

/** A term that explains itself: in a tooltip, and in a popover by click or key. */
function term(name, explanation) {
  if (!explanation) return make("span", "", name);
  const element = button(name, () => {
    const popover = find("explanation");
    popover.replaceChildren(make("b", "", name), `: ${explanation}.`);
    const place = element.getBoundingClientRect();
    const isLow = place.bottom > innerHeight - 160;
    popover.style.left = `${Math.max(8, Math.min(place.left, document.documentElement.clientWidth - 328))}px`;
    popover.style.top = isLow ? "auto" : `${place.bottom + 6}px`;
    popover.style.bottom = isLow ? `${innerHeight - place.top + 6}px` : "auto";
    announce(popover.textContent);
  }, "term");
  element.title = `${explanation}.`;
  element.popoverTargetElement = find("explanation");
  return element;
}

/** Has a screen reader say a text after what it is saying. */
function announce(text) {
  const said = find("announcer");
  said.append(make("p", "", text));
  while (said.childElementCount > 20) said.firstChild.remove();
}
