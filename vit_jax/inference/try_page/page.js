"use strict";

// Text from the server enters the page as text alone, never as HTML.
const at = (id) => document.getElementById(id);
let model = null;
let shown = null; // address of the image on the page
let latest = 0; // of several images, the last one wins

function say(text, isWrong = false) {
  at("status").textContent = text;
  at("status").classList.toggle("wrong", isWrong);
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(1)} MB`;
}

function showClasses(classes) {
  at("classes").replaceChildren(
    ...classes.map(({ name, probability }) => {
      const row = document.createElement("div");
      const label = document.createElement("b");
      const chance = document.createElement("span");
      const bar = document.createElement("progress");
      label.textContent = name;
      chance.textContent = `${(100 * probability).toFixed(1)} %`;
      bar.value = probability;
      bar.setAttribute("aria-label", `${name}: ${chance.textContent}`);
      row.append(label, chance);
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

async function classify(file) {
  const mine = ++latest;
  at("answer").classList.add("old");
  if (model && file.size > model.max_bytes) {
    say(
      `${file.name}: got ${megabytes(file.size)}, expected at most` +
        ` ${megabytes(model.max_bytes)}.`,
      true,
    );
    return;
  }
  say(`Looking at ${file.name || "the image"} …`);
  try {
    const reply = await fetch("predict", { method: "POST", body: file });
    const answer = await reply.json();
    if (mine !== latest) return;
    if (!reply.ok) {
      say(`${file.name || "image"}: ${answer.error}`, true);
      return;
    }
    show(file, answer);
    at("answer").classList.remove("old");
    say(`Answered in ${answer.seconds.toFixed(2)} s.`);
  } catch {
    if (mine === latest) {
      say("No answer: is `vit-jax serve` still running?", true);
    }
  }
}

function take(files) {
  const [file] = files;
  if (!file) {
    say("Got no file there, expected an image.", true);
  } else {
    classify(file);
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
