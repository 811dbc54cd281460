// Sends POST requests, one after the other, until its input ends.
//
//     node http_client.mjs URL
//
// Prints {"answered": N, "failures": [...]}.
import { setTimeout } from "node:timers/promises";

let ended = false;
process.stdin.on("end", () => (ended = true)).resume();

let answered = 0;
const failures = [];
while (!ended) {
  await setTimeout(5);
  try {
    const answer = await fetch(process.argv[2], {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ prompt: "import os" }),
    });
    const body = await answer.text();
    if (answer.status === 200) answered++;
    else failures.push(`${answer.status} ${body}`);
  } catch (error) {
    failures.push(`${error}: ${error.cause}`);
  }
}
console.log(JSON.stringify({ answered, failures }));
process.exit();
