// The page's frame: tabs, the colour scheme, and what the server says about itself.

import { askForKey, information } from "./api.js";
import { byId, h } from "./dom.js";
import { startPlayground } from "./playground.js";
import { startRace } from "./race.js";
import { offer } from "./settings.js";
import { startTheory } from "./theory.js";
import { startTraces } from "./traces.js";

function startTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const panel = (tab) => byId(tab.getAttribute("aria-controls"));

  function open(tab, focus = false) {
    for (const other of tabs) {
      other.setAttribute("aria-selected", String(other === tab));
      other.tabIndex = other === tab ? 0 : -1;
      panel(other).hidden = other !== tab;
    }
    if (focus) tab.focus();
    history.replaceState(null, "", `#${panel(tab).id}`);
  }

  for (const [place, tab] of tabs.entries()) {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const to = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      open(tabs[(to + tabs.length) % tabs.length], true);
    });
  }
  const named = () => tabs.find((tab) => `#${panel(tab).id}` === location.hash);
  window.addEventListener("hashchange", () => named() && open(named()));
  open(named() ?? tabs[0]);
  return (id) => open(tabs.find((tab) => panel(tab).id === id));
}

function startScheme() {
  const choice = byId("scheme");
  const apply = () => {
    if (choice.value === "system") delete document.documentElement.dataset.scheme;
    else document.documentElement.dataset.scheme = choice.value;
  };
  try {
    choice.value = localStorage.getItem("scheme") ?? "system";
  } catch {
    choice.value = "system"; // storage may be forbidden; the choice then holds while the page is open
  }
  if (choice.selectedIndex < 0) choice.value = "system";
  apply();
  choice.addEventListener("change", () => {
    apply();
    try {
      localStorage.setItem("scheme", choice.value);
    } catch {
      // as above
    }
  });
}

async function meetServer() {
  const about = byId("about");
  try {
    const info = await information();
    about.replaceChildren(h("strong", {}, info.model), info.version ? ` · Forerun ${info.version}` : "");
    offer(info);
  } catch (error) {
    offer({ model: "", drafters: [], first: null, chat: true });
    if (error.status === 401) {
      const ask = async () => (await askForKey()) && meetServer();
      about.replaceChildren(h("button", { type: "button", onclick: ask }, "Enter the API key"));
    } else {
      about.textContent = `${error.message} Theory and traces work without it.`;
    }
  }
}

const open = startTabs();
startScheme();
startPlayground(startTheory());
startRace();
startTraces(() => open("traces"));
meetServer();
document.documentElement.dataset.ready = "true";
