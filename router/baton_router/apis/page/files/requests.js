"use strict";

function headers() {
  const given = { "content-type": "application/json" };
  const key = find("api-key").value;
  if (key) given.authorization = `Bearer ${key}`;
  return given;
}

/** The reason that a response gives for an error, be it from the router or from a proxy. */
async function reasonOf(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `HTTP status ${response.status} ${response.statusText}`;
  }
}

/** The objects of a stream of server-sent events. Throws if it ends before its end is said. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error("The connection ended before the answer did.");
    held += value;
    const whole = held.split("\n\n");
    held = whole.pop();
    for (const event of whole) {
      if (!event.startsWith("data: ")) continue; // a comment that keeps the connection open
      const data = event.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

/** Yields the chunks of the answer to a request. Throws an error with the reason. */
async function* answerTo({ path, body }, signal) {
  let response;
  try {
    response = await fetch(path, {
      method: "POST", headers: headers(), body: JSON.stringify(body), signal,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(`The router does not answer: ${error.message}.`);
  }
  if (!response.ok) throw new Error(await reasonOf(response));
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    yield event;
  }
}

/** A request as a command for a POSIX shell. */
function curlOf({ path, body }) {
  const quoted = `'${JSON.stringify(body).replaceAll("'", "'\\''")}'`;
  const lines = [`curl --no-buffer ${location.origin}${path}`, "-H 'content-type: application/json'"];
  if (find("api-key").value) lines.push('-H "authorization: Bearer $BATON_TOKEN"');
  lines.push(`-d ${quoted}`);
  return lines.join(" \\\n  ");
}
