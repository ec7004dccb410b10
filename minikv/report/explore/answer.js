/* The methods to choose from, the tokens of the chosen one's answer, and what one of them looked at. */

function buildMethods(choose) {
  data.methods.forEach((method, index) => {
    const title = make("span", { className: "title", id: `method-${index}`, textContent: method.title });
    const radio = make("input", { type: "radio", name: "method", value: index });
    radio.setAttribute("aria-labelledby", title.id);
    radio.setAttribute("aria-describedby", `answer-${index}`);
    radio.addEventListener("change", () => choose(index));
    const share = sum(method.entries) / (data.layers * data.prompt_tokens);
    const figures = make("span", { className: "quiet", textContent: `${percent(share)}, ${size(method.bytes)}` });
    const text = method.text.trim() || "no answer";
    const answer = make("span", { className: "text", id: `answer-${index}`, textContent: text });
    const heading = make("span", { className: "heading" }, radio, title, figures);
    element("methods").append(make("label", { className: "method" }, heading, answer));
  });
}

/** The answer's tokens as buttons. `act` is called with what happened, "enter", "leave" or "hold", and to which token. */
function buildAnswer(method, act) {
  const buttons = method.answer.map((text, step) => {
    const button = make("button", { type: "button", textContent: oneLine(text) || "⋯" });
    button.setAttribute("aria-label", `${readable(text)}, token ${step + 1} of ${method.answer.length}`);
    button.setAttribute("aria-pressed", "false");
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, () => act("enter", step));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, () => act("leave", step));
    button.addEventListener("click", () => act("hold", step));
    return text.includes("\n") ? [button, make("br")] : [button];
  });
  element("answer").replaceChildren(...buttons.flat());
  const empty = "The model ended its turn at once, or no token was asked for.";
  if (buttons.length === 0) element("answer").append(make("span", { className: "quiet", textContent: empty }));
  element("hint").textContent = buttons.length
    ? "Point at a token, or go there with Tab, to see what it looked at; click it to hold it."
    : "";
}

const answerTokens = () => element("answer").querySelectorAll("button");

/** Mark the token that is shown, the one that is held, and those that it looked at in the answer itself. */
function paintAnswer(shown, held, found) {
  const shares = new Map(found.map(({ position, share }) => [position - data.prompt_tokens, share]));
  answerTokens().forEach((button, step) => {
    button.classList.toggle("shown", step === shown);
    button.setAttribute("aria-pressed", String(step === held));
    if (shares.has(step)) {
      button.dataset.seen = "";
      button.style.setProperty("--share", Math.sqrt(shares.get(step)).toFixed(3));
    } else {
      delete button.dataset.seen;
    }
  });
}

/** The list of what the shown token looked at, each entry with its neighbours in the text. */
function listLooks(method, step, layer, view, go) {
  const found = step === null ? [] : looks(method, step, layer, view);
  element("seen-title").hidden = step === null;
  element("seen-note").textContent = step === null ? "" : noteOn(found, step);
  if (step !== null) {
    element("seen-title").textContent = `What “${readable(method.answer[step])}” looked at in layer ${layer}`;
  }
  element("seen").replaceChildren(...found.map(({ position, share }) => {
    const place = position - data.prompt_tokens; // in the answer
    const [before, itself, after] = place < 0 ? inContext(position) : around(method.answer, place);
    const bar = make("meter", { min: 0, max: 1, value: share });
    bar.setAttribute("aria-hidden", "true");
    const text = [
      make("span", { className: "before" }, make("span", { textContent: before })), // two: it is cut at its left end
      make("b", { textContent: itself }),
      make("span", { className: "after", textContent: after }),
    ];
    const title = place < 0 ? `token ${count(position)}` : `token ${place + 1} of the answer`;
    const button = make("button", { type: "button", disabled: place >= 0, title }, percent(share), bar, ...text);
    button.addEventListener("click", () => go(position));
    return make("li", {}, button);
  }));
  return found;
}

function noteOn(found, step) {
  const together = `Together ${percent(sum(found.map(({ share }) => share)))} of its attention.`;
  const first = "The first token comes from the prefill, which saw the whole prompt: it is the same for every method.";
  return step === 0 ? `${together} ${first}` : together;
}
