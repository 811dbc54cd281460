"use strict";

/* The conversation is here alone: it ends with the page.

   An exchange is what was asked, as messages or as a text to continue, the request that was made of
   it, and the answer as a message; an answer of which nothing came is no part of the conversation. */
let exchanges = [];
let running = null; // what stops the answer that is being written
let models = [];

const servedModel = () => models.find(({ id }) => id === find("models").value);
const takesImages = () => Boolean(servedModel()?.takes_images) && find("mode").value === "chat";

async function loadModels() {
  try {
    const response = await fetch("/v1/models", { headers: headers() });
    if (response.status === 401) {
      find("model").textContent = "An API key is needed.";
      showOptions(true);
      find("api-key").focus();
      return;
    }
    if (!response.ok) throw new Error(await reasonOf(response));
    models = (await response.json()).data;
  } catch (error) {
    find("model").textContent = error.message;
    return;
  }
  find("models").replaceChildren(...models.map(({ id }) => new Option(id)));
  find("models").hidden = models.length < 2;
  showModel();
}

function showModel() {
  const { id, max_model_len: length, has_chat_template: hasTemplate = true, sampling_defaults: own = {} } = servedModel();
  const upTo = length ? `up to ${length.toLocaleString("en")} tokens` : "";
  const defaults = Object.entries(own).map(([name, value]) => `${name.replace("_", " ")} ${value}`);
  const texts = [...(models.length > 1 ? [] : [id]), upTo, ...defaults];
  find("temperature").defaultValue = own.temperature ?? 0.7; // shown until it is changed
  find("model").textContent = texts.filter(Boolean).join(", ");
  const mode = find("mode");
  mode.querySelector("[value=chat]").disabled = !hasTemplate;
  mode.value = hasTemplate ? "chat" : "completion";
  showMode();
}

function showMode() {
  const isChat = find("mode").value === "chat";
  find("prompt").placeholder = isChat ? "Message" : "Text to continue";
  for (const name of ["system", "tools", "tool-choice"]) find(name).disabled = !isChat;
  for (const name of ["image-button", "attached"]) find(name).hidden = !takesImages();
}

function showOptions(isShown) {
  find("options").hidden = !isShown;
  find("options-button").setAttribute("aria-expanded", String(isShown));
}

/** The tools of the options. Throws an error if they are no JSON list. */
function toolsGiven() {
  const text = find("tools").value.trim();
  if (!text) return [];
  const tools = JSON.parse(text);
  if (!Array.isArray(tools)) throw new Error("a list in [] is expected");
  return tools;
}

/** Whether the tools can be sent; if not, the field says why. */
function areToolsValid() {
  const field = find("tools");
  field.setCustomValidity("");
  try {
    toolsGiven();
  } catch (error) {
    field.setCustomValidity(`Tools are no JSON list: ${error.message}`);
    showOptions(true);
    field.reportValidity();
  }
  return field.validity.valid;
}

/** The messages of the conversation, and those that are asked now. */
function messagesWith(asked) {
  const system = find("system").value.trim();
  return [
    ...(system ? [{ role: "system", content: system }] : []),
    ...exchanges.flatMap(({ messages, answer }) => (messages && answer ? [...messages, answer] : [])),
    ...asked,
  ];
}

function requestFor({ messages, prompt }) {
  const body = { model: servedModel()?.id };
  if (messages) {
    body.messages = messagesWith(messages);
    const tools = toolsGiven();
    if (tools.length) body.tools = tools;
    if (tools.length && find("tool-choice").value !== "auto") body.tool_choice = find("tool-choice").value;
  } else {
    body.prompt = prompt;
  }
  // A field that is empty leaves the default to the router, but that of a completion is short.
  if (find("max-tokens").value) body.max_tokens = find("max-tokens").valueAsNumber;
  else if (!messages) body.max_tokens = servedModel()?.max_model_len;
  if (find("temperature").value) body.temperature = find("temperature").valueAsNumber;
  body.stream = true;
  body.baton = { timeline: true };
  return { path: messages ? "/v1/chat/completions" : "/v1/completions", body };
}

/** The card of an exchange: what was asked, and the answer while it is written. */
class Card {
  constructor(exchange) {
    this.exchange = exchange;
    this.bound = find("max-tokens").value
      ? "Max tokens, or at the model's length; raise it in the options."
      : "the model's length; begin a new chat.";
    this.text = "";
    this.thought = "";
    this.calls = []; // tool calls, as in a message
    this.numSaid = 0; // characters that a screen reader was given
    this.saidAt = performance.now();
    this.element = make("article", "card is-running");
    this.element.setAttribute("aria-busy", "true");
    const asked = exchange.messages?.[0].role === "tool" ? "Tool results" : "You";
    this.element.append(make("h2", "unseen", asked), this.question());
    this.answer = make(exchange.messages ? "div" : "pre", "answer");
    this.element.append(this.answer);
    this.markdown = exchange.messages ? new Markdown(this.answer) : null;
  }

  question() {
    const { messages, prompt, images } = this.exchange;
    if (!messages) return make("p", "prompt is-continued", prompt);
    const texts = messages.map(({ role, content, name }) => (role === "tool" ? `${name}: ${content}` : prompt ?? content));
    const element = make("div", messages[0].role === "tool" ? "prompt is-result" : "prompt", texts.join("\n"));
    if (images?.length) element.prepend(...images.map(pictureOf));
    return element;
  }

  /** Takes a chunk of the answer's stream. */
  take(chunk) {
    for (const { delta, text, finish_reason: reason } of chunk.choices) {
      this.write(delta ? delta.content : text);
      const thought = delta?.reasoning_content ?? delta?.reasoning;
      if (thought) this.think(thought);
      for (const call of delta?.tool_calls ?? []) this.call(call);
      if (reason === "length") this.note(`Cut at ${this.bound}`);
    }
    if (chunk.baton) this.about = about(chunk.baton.requests[0]);
  }

  write(text) {
    if (!text) return;
    this.text += text;
    if (this.markdown) this.markdown.write(text);
    else this.answer.append(text);
    this.say(false);
  }

  think(text) {
    if (!this.thoughts) {
      const details = make("details", "reasoning");
      this.thoughts = make("div", "thoughts");
      details.append(make("summary", "", "Reasoning"), this.thoughts);
      this.answer.before(details);
    }
    this.thought += text;
    this.thoughts.append(text);
  }

  call({ index, id, function: { name = "", arguments: more = "" } = {} }) {
    const call = (this.calls[index] ??= { id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += name;
    call.function.arguments += more;
    this.shown ??= [];
    const shown = (this.shown[index] ??= this.callShown(index));
    shown.name.textContent = call.function.name;
    shown.given.textContent = prettyJson(call.function.arguments);
  }

  callShown(index) {
    const element = make("section", "tool-call");
    element.setAttribute("aria-label", `Tool call ${index + 1}`);
    const head = make("div", "code-head");
    const name = make("code");
    head.append(make("span", "", "Tool call"), name);
    const given = make("pre");
    given.tabIndex = 0;
    element.append(head, given);
    this.element.append(element);
    return { element, name, given };
  }

  /** Fields for the results of the tool calls, which the user plays the part of. */
  askResults() {
    const fields = this.calls.map((call, i) => {
      const label = make("label", "result", `Result of ${call.function.name}`);
      const field = make("textarea", "code");
      field.rows = 1;
      field.spellcheck = false;
      field.addEventListener("keydown", (event) => onEnter(event, send));
      label.append(field);
      this.shown[i].element.append(label);
      return field;
    });
    const send = () => {
      if (running) return;
      submit({
        messages: this.calls.map(({ id, function: { name } }, i) => (
          { role: "tool", tool_call_id: id, name, content: fields[i].value }
        )),
      });
    };
    const row = make("div", "row only-last");
    row.append(button(fields.length > 1 ? "Send results" : "Send result", send, "primary"));
    this.element.append(row);
  }

  note(text) {
    this.element.append(make("p", "note quiet", text));
  }

  fail(text) {
    const line = make("p", "wrong", text);
    line.setAttribute("role", "alert");
    this.element.append(line);
  }

  /** Gives a screen reader the sentences that are whole, at most one time in two seconds. */
  say(isWhole) {
    const rest = this.text.slice(this.numSaid);
    const ends = [...rest.matchAll(/[.!?:]\s|\n/g)];
    const length = isWhole ? rest.length : (ends.at(-1)?.index ?? -1) + 1;
    const now = performance.now();
    if (!length || (!isWhole && now - this.saidAt < 2000)) return;
    announce(rest.slice(0, length));
    this.numSaid += length;
    this.saidAt = now;
  }

  /** Ends the answer, and returns it as a message; null if nothing came. */
  end() {
    this.markdown?.render();
    this.say(true);
    this.element.classList.remove("is-running");
    this.element.removeAttribute("aria-busy");
    if (!this.exchange.messages || !(this.text || this.calls.length)) return null;
    const answer = { role: "assistant", content: this.text || null };
    if (this.thought) answer.reasoning_content = this.thought;
    if (this.calls.length) answer.tool_calls = this.calls;
    return answer;
  }

  showActions() {
    const actions = make("div", "actions");
    actions.setAttribute("role", "group");
    actions.setAttribute("aria-label", "Actions");
    if (this.text) actions.append(copyButton("Copy", () => this.text));
    actions.append(copyButton("Copy as curl", () => curlOf(this.exchange.request)));
    const again = button("Try again", () => replaceLast((last) => submit(last)));
    again.classList.add("only-last");
    actions.append(again);
    const [first] = this.exchange.messages ?? [];
    if (first?.role !== "tool") {
      const edit = button("Edit", () => replaceLast(({ prompt, images }) => {
        find("prompt").value = prompt;
        attached = images ?? [];
        showAttached();
        find("prompt").focus();
      }));
      edit.classList.add("only-last");
      actions.append(edit);
    }
    this.element.append(actions);
    if (this.about) this.element.append(this.about);
  }
}

function prettyJson(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is not whole yet
  }
}

/** Takes the last exchange out of the conversation and passes it on. */
function replaceLast(next) {
  if (running) return;
  const last = exchanges.pop();
  last.card.element.remove();
  showEmpty();
  next({ messages: last.messages, prompt: last.prompt, images: last.images });
}

function showEmpty() {
  find("empty").hidden = exchanges.length > 0;
  find("new-chat").disabled = !exchanges.length;
}

const isAtEnd = () => innerHeight + scrollY > document.documentElement.scrollHeight - 80;
const scrollToEnd = () => scrollTo(0, document.documentElement.scrollHeight);

/** Asks messages or a text, and shows the answer as it comes. Messages that a user wrote come with
    their text and images. */
async function submit({ messages, prompt, images }) {
  if (messages && !areToolsValid()) return;
  const exchange = { messages, prompt, images };
  exchange.request = requestFor(exchange);
  const card = new Card(exchange);
  exchange.card = card;
  exchanges.push(exchange);
  const stopper = new AbortController();
  running = stopper;
  find("send").textContent = "Stop";
  showEmpty();
  find("answers").append(card.element);
  find("prompt").focus(); // also where the button that asked is gone
  scrollToEnd();
  announce("The model is asked.");
  try {
    for await (const chunk of answerTo(exchange.request, stopper.signal)) {
      const followed = isAtEnd(); // who has scrolled up reads there
      card.take(chunk);
      if (followed) scrollToEnd();
    }
  } catch (error) {
    if (error.name === "AbortError") card.note("Stopped.");
    else card.fail(error.message);
  }
  const followed = isAtEnd();
  exchange.answer = card.end();
  if (exchange.answer?.tool_calls) card.askResults();
  card.showActions();
  if (followed) scrollToEnd();
  if (running !== stopper) return; // a new chat has begun
  running = null;
  find("send").textContent = "Send";
}

function stop() {
  running?.abort();
  running = null;
  find("send").textContent = "Send";
}

function newChat() {
  stop();
  exchanges = [];
  find("answers").replaceChildren();
  find("announcer").replaceChildren();
  takeAttached();
  showEmpty();
  find("prompt").focus();
}

function ask(text, images = []) {
  if (find("mode").value !== "chat") return submit({ prompt: text });
  const content = contentOf(text, images);
  return submit({ messages: [{ role: "user", content }], prompt: text, images });
}

/** Calls a function on Enter; with Shift it is a new line, and to an input method a choice. */
function onEnter(event, call) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  call();
}

function send() {
  const field = find("prompt");
  const isEmpty = !field.value.trim() && !(attached.length && takesImages());
  if (running || isEmpty || !areToolsValid()) return;
  ask(field.value, takesImages() ? takeAttached() : []);
  field.value = "";
}

find("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else send();
});
find("prompt").addEventListener("keydown", (event) => onEnter(event, send));
addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector(":popover-open")) stop();
});
for (const example of document.querySelectorAll(".examples button")) {
  example.addEventListener("click", () => ask(example.textContent));
}
find("new-chat").addEventListener("click", newChat);
find("options-button").addEventListener("click", () => showOptions(find("options").hidden));
find("models").addEventListener("change", showModel);
find("mode").addEventListener("change", showMode);
find("api-key").addEventListener("change", loadModels);
find("tools").addEventListener("input", () => find("tools").setCustomValidity(""));
find("theme").addEventListener("click", () => {
  chooseTheme(isDark() ? "light" : "dark");
  find("theme").setAttribute("aria-pressed", String(isDark()));
});
find("theme").setAttribute("aria-pressed", String(isDark()));
addEventListener("pagehide", () => running?.abort()); // a page that is kept for later would go on
showEmpty();
find("prompt").focus(); // before a missing key takes the focus
loadModels();
