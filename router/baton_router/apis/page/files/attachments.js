"use strict";

/* Images of the message that is being written: dropped, pasted or chosen. */
let attached = []; // of each its name, and its file as a data URL

const IMAGE_TYPES = find("image-files").accept.split(",");

/** Adds files to the message, or says why they are none of it. */
async function attach(files) {
  const field = find("image-files");
  const wrong = [...files].find(({ type }) => !IMAGE_TYPES.includes(type));
  if (!takesImages()) noteAttached("Images are for conversations with a model that takes them.");
  else if (wrong) noteAttached(`${wrong.name} is no PNG, JPEG, WebP or GIF.`);
  else {
    for (const file of files) attached.push({ name: file.name, url: await dataUrlOf(file) });
    showAttached();
    announce(`${attached.length} ${attached.length === 1 ? "image is" : "images are"} attached.`);
  }
  field.value = ""; // so that the same file can be chosen again
  find("prompt").focus();
}

function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

function noteAttached(text) {
  showAttached();
  const note = make("p", "wrong", text);
  note.setAttribute("role", "alert");
  find("attached").append(note);
  find("attached").hidden = false;
}

function showAttached() {
  const shown = attached.map((image) => {
    const remove = button("Remove", () => {
      attached = attached.filter((other) => other !== image);
      showAttached();
      find("prompt").focus();
    });
    remove.setAttribute("aria-label", `Remove ${image.name}`);
    const place = make("figure");
    place.append(pictureOf(image), remove);
    return place;
  });
  find("attached").replaceChildren(...shown);
}

function pictureOf({ name, url }) {
  const picture = make("img");
  picture.src = url;
  picture.alt = name;
  return picture;
}

/** Takes the images from the message. */
function takeAttached() {
  const images = attached;
  attached = [];
  showAttached();
  return images;
}

/** The content of a message of a user. */
function contentOf(text, images) {
  if (!images.length) return text;
  const parts = images.map(({ url }) => {
    const type = url.startsWith("data:image/gif") ? "video_url" : "image_url"; // may be animated
    return { type, [type]: { url } };
  });
  return text ? [...parts, { type: "text", text }] : parts;
}

const hasFiles = (event) => event.dataTransfer?.types.includes("Files");

addEventListener("dragover", (event) => { if (hasFiles(event)) event.preventDefault(); });
addEventListener("drop", (event) => {
  if (!hasFiles(event)) return;
  event.preventDefault(); // or the browser would leave the page for the file
  attach(event.dataTransfer.files);
});
find("prompt").addEventListener("paste", (event) => {
  if (!event.clipboardData.files.length) return;
  event.preventDefault();
  attach(event.clipboardData.files);
});
find("image-button").addEventListener("click", () => find("image-files").click());
find("image-files").addEventListener("change", () => attach([...find("image-files").files]));
