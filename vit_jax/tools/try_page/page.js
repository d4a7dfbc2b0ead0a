"use strict";

// Text from the server enters the page as text alone, never as HTML.
const at = (id) => document.getElementById(id);
let model = null;
let shown = null; // address of the image on the page
let latest = 0; // number of drops; an answer to an earlier one is left out

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

// Text of a class's probability, or of a number that the model predicts.
function outcome({ probability, value }) {
  return value === undefined
    ? `${(100 * probability).toFixed(1)} %`
    : String(Number(value.toPrecision(5)));
}

function showClasses(classes) {
  at("classes").replaceChildren(
    ...classes.map((answer) => {
      const row = document.createElement("div");
      const label = document.createElement("b");
      const chance = document.createElement("span");
      const bar = document.createElement("progress");
      label.textContent = answer.name;
      chance.textContent = outcome(answer);
      row.append(label, chance);
      if (answer.value !== undefined) {
        const number = document.createElement("li");
        number.append(row);
        return number;
      }
      bar.value = answer.probability;
      bar.setAttribute("aria-label", `${answer.name}: ${chance.textContent}`);
      const item = document.createElement("li");
      item.append(row, bar);
      return item;
    }),
  );
}

function show(file, answer) {
  if (shown) URL.revokeObjectURL(shown);
  shown = URL.createObjectURL(file);
  at("image").src = shown;
  const [width, height] = answer.size;
  at("image").classList.toggle("small", Math.max(width, height) <= 96);
  at("size").textContent = `${file.name || "image"}, ${width} x ${height}`;
  at("seen").hidden = !answer.attention;
  if (answer.attention) at("attention").src = answer.attention;
  at("what").textContent = answer.attention_is || "";
  showClasses(answer.classes);
  at("answer").hidden = false;
}

// Returns what the server says of an image, or {error: text}.
async function ask(file) {
  if (model && file.size > model.max_bytes) {
    return {
      error:
        `got ${megabytes(file.size)}, expected at most` +
        ` ${megabytes(model.max_bytes)}.`,
    };
  }
  const reply = await fetch("predict", { method: "POST", body: file });
  return reply.json();
}

// Adds a line to the list of several images; choosing it shows the answer.
function list(file, answer) {
  const item = document.createElement("li");
  const line = document.createElement(answer.error ? "p" : "button");
  const label = document.createElement("b");
  const what = document.createElement("span");
  label.textContent = file.name || "image";
  if (answer.error) {
    what.textContent = answer.error;
    line.className = "wrong";
  } else {
    const [first] = answer.classes;
    what.textContent = `${first.name} ${outcome(first)}`;
    line.addEventListener("click", () => show(file, answer));
  }
  line.append(label, what);
  item.append(line);
  at("files").append(item);
}

async function take(fileList) {
  const files = [...fileList];
  if (!files.length) {
    say("Got no file there, expected an image.", true);
    return;
  }
  const mine = ++latest;
  const isList = files.length > 1;
  at("answer").classList.add("old");
  at("files").replaceChildren();
  at("files").hidden = !isList;
  let count = 0;
  let last = null;
  try {
    for (const [i, file] of files.entries()) {
      const which = isList ? ` (${i + 1} of ${files.length})` : "";
      say(`Looking at ${file.name || "the image"}${which} …`);
      const answer = await ask(file);
      if (mine !== latest) return;
      last = answer;
      if (isList) list(file, answer);
      if (answer.error) continue;
      count += 1;
      if (count === 1) {
        show(file, answer);
        at("answer").classList.remove("old");
      }
    }
  } catch {
    if (mine === latest) {
      say("No answer: is `vit-jax serve` still running?", true);
    }
    return;
  }
  if (isList) {
    const isWhole = count === files.length;
    say(`Answered for ${count} of ${files.length} images.`, !isWhole);
  } else if (last.error) {
    say(`${files[0].name || "image"}: ${last.error}`, true);
  } else {
    say(`Answered in ${last.seconds.toFixed(2)} s.`);
  }
}

at("file").addEventListener("change", (event) => {
  if (event.target.files.length) take(event.target.files);
  event.target.value = ""; // so that the same file can be chosen again
});
at("drop").addEventListener("keydown", (event) => {
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    at("file").click();
  }
});
// The whole page takes a drop: a near miss would make the browser leave it.
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  at("drop").classList.add("over");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) at("drop").classList.remove("over");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  at("drop").classList.remove("over");
  take(event.dataTransfer.files);
});
document.addEventListener("paste", (event) => {
  if (event.clipboardData.files.length) take(event.clipboardData.files);
});

fetch("model")
  .then((reply) => reply.json())
  .then((answer) => {
    model = answer;
    at("model").textContent = answer.text;
    document.title = `${answer.name}: vit_jax`;
  })
  .catch(() => say("No answer: is `vit-jax serve` still running?", true));
