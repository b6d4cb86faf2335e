// The fields that Playground and Race share, and the request they make.

import { h } from "./dom.js";

let model = "";
const offers = [];

/** `plain` offers plain decoding as a method; `seed` is what the field starts with. */
export function createSettings({ name, prompt, plain, temperature, seed }) {
  const id = (part) => `${name}-${part}`;
  const field = (part, words, input, help = null) => h("div", { class: `field ${part}` },
    h("label", { for: id(part) }, words), input, help && h("p", { class: "help", id: id(`${part}-help`) }, help));
  const number = (part, attributes) =>
    h("input", { id: id(part), type: "number", inputmode: "decimal", ...attributes });

  const promptBox = h("textarea", { id: id("prompt"), rows: 4, required: true, spellcheck: "false" }, prompt);
  const format = h("select", { id: id("format") },
    h("option", { value: "chat" }, "as a question (chat)"), h("option", { value: "text" }, "as a text to go on with"));
  const method = h("select", { id: id("method"), "aria-describedby": id("method-help") });
  const about = h("p", { class: "help", id: id("method-help") });
  const shape = h("input", {
    id: id("shape"), type: "text", placeholder: "auto", autocomplete: "off", spellcheck: "false",
    pattern: "[0-9]+|([a-z_]+:)?[0-9]+(,[0-9]+)*", "aria-describedby": id("shape-help"),
    title: "a length such as 5, or a tree such as 3,2,1 or dynamic:8,5,40",
  });
  const heat = number("temperature", { min: 0, max: 2, step: 0.1, value: temperature });
  const topP = number("top-p", { min: 0.05, max: 1, step: 0.05, value: 1 });
  const seedBox = number("seed", {
    min: 0, max: 4294967295, step: 1, value: seed, placeholder: "any", inputmode: "numeric",
  });
  const longest = number("max-tokens", {
    min: 1, max: 4096, step: 1, value: 120, required: true, inputmode: "numeric",
  });

  method.addEventListener("change", describe);
  function describe() {
    about.textContent = method.selectedOptions[0]?.dataset.about ?? "";
    shape.disabled = method.value === "none";
  }
  offers.push({ method, plain, describe, format });

  function request({ off = false } = {}) {
    const wanted = shape.value.trim();
    const none = off || method.value === "none";
    const body = {
      model,
      stream: true,
      stream_options: { include_usage: true },
      temperature: Number(heat.value),
      top_p: Number(topP.value),
      max_tokens: Number(longest.value),
      speculation: none ? { off: true, trace: true } : { drafter: method.value, trace: true },
    };
    if (seedBox.value !== "") body.seed = Number(seedBox.value);
    if (!none && wanted !== "") {
      if (/^[0-9]+$/u.test(wanted)) body.speculation.length = Number(wanted);
      else body.speculation.tree = wanted;
    }
    if (format.value === "chat") {
      return { path: "v1/chat/completions", body: { ...body, messages: [{ role: "user", content: promptBox.value }] } };
    }
    return { path: "v1/completions", body: { ...body, prompt: promptBox.value } };
  }

  const element = h("div", { class: "settings" },
    field("prompt", "Prompt", promptBox),
    h("div", { class: "pair" }, field("method", "Method", method), field("shape", "Draft length or tree", shape)),
    about,
    h("p", { class: "help", id: id("shape-help") }, "A length such as 5, or a tree such as 3,2,1 or dynamic:8,5,40."),
    h("div", { class: "row" },
      field("temperature", "Temperature", heat), field("top-p", "Top p", topP),
      field("seed", "Seed", seedBox), field("max-tokens", "Max tokens", longest)),
    field("format", "Read the prompt", format));
  return {
    element,
    request,
    seed: seedBox,
    get method() {
      return method.value;
    },
    get length() {
      return Number(longest.value);
    },
  };
}

/** Once the server has said what it has. */
export function offer(info) {
  model = info.model;
  for (const { method, plain, describe, format } of offers) {
    const drafters = info.drafters.filter(({ name }) => name !== "none");
    const option = (value, about, words) => h("option", { value, "data-about": about ?? "" }, words);
    const options = drafters.map(({ name, description }) => option(name, description, name));
    if (plain || options.length === 0) {
      options.push(option("none", "Plain decoding: nothing is drafted, one token per pass.", "none (plain)"));
    }
    method.replaceChildren(...options);
    if (drafters.some(({ name }) => name === info.first)) method.value = info.first;
    format.options[0].disabled = !info.chat;
    if (!info.chat) format.value = "text";
    describe();
  }
}
