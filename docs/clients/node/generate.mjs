// A client of Baton in Node, by the .proto files as they are: no code is generated.
//
//   npm ci
//   node generate.mjs PROTOS HOST:PORT[,HOST:PORT...] PROMPT
//
// PROTOS is the folder `protos` of Baton's sources.

import { randomBytes } from "node:crypto";
import { setTimeout as sleep } from "node:timers/promises";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";
import protobuf from "protobufjs";

const LARGEST_PAUSE = 5000; // milliseconds between two tries
const OPTIONS = {
  "grpc.max_reconnect_backoff_ms": 1000,
  // A name is resolved again a second after its routers were replaced, not half a minute.
  "grpc.dns_min_time_between_resolutions_ms": 1000,
  // A router that falls silent is noticed within some seconds.
  "grpc.keepalive_time_ms": 10_000,
  "grpc.keepalive_timeout_ms": 5_000,
};

// What of google.rpc says when to ask again.
const { root } = protobuf.parse(`
  syntax = "proto3";
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message Any { string type_url = 1; bytes value = 2; }
  message RetryInfo { Duration retry_delay = 1; }
  message Duration { int64 seconds = 1; int32 nanos = 2; }`);
const Status = root.lookupType("Status");
const RetryInfo = root.lookupType("RetryInfo");

/** For how long a router that has too much to do would not be asked, in milliseconds. */
function retryDelay(error) {
  const [details] = error.metadata.get("grpc-status-details-bin");
  for (const { typeUrl, value } of details ? Status.decode(details).details : []) {
    if (typeUrl.endsWith("/google.rpc.RetryInfo")) {
      const { seconds = 0, nanos = 0 } = RetryInfo.decode(value).retryDelay ?? {};
      return Number(seconds) * 1e3 + nanos / 1e6;
    }
  }
  throw error; // a message that is too large, which none would take
}

/** What has come of one sequence. */
class Sequence {
  tokenIds = [];
  text = "";
  reason = "FINISH_REASON_UNSPECIFIED";
  #hasRest = false;

  /**
   * Takes some tokens; returns their text, which is empty if it has come before.
   *
   * (sequence, position) names a token: another router, or the same once more, says none twice.
   * Text that was held back may come behind the last token, with no token of its own.
   */
  add(chunk) {
    if (chunk.token_ids.length > 0) {
      if (chunk.position !== this.tokenIds.length) throw new Error("tokens are left out");
      this.tokenIds.push(...chunk.token_ids);
      this.reason = chunk.finish_reason;
    } else if (this.#hasRest) {
      return "";
    } else {
      this.#hasRest = true;
    }
    this.text += chunk.text;
    return chunk.text;
  }
}

/** Routers, of which the first that answers is asked. */
class Client {
  #asked = 0;

  constructor(protos, addresses, token) {
    const loaded = loadSync("baton/v1/inference.proto", {
      includeDirs: [protos],
      keepCase: true,
      longs: String, // a seed has 64 bits
      enums: String,
      arrays: true,
      oneofs: true,
      defaults: true,
    });
    const { Inference } = grpc.loadPackageDefinition(loaded).baton.v1;
    const plain = grpc.credentials.createInsecure();
    this.stubs = addresses.map((address) => new Inference(address, plain, OPTIONS));
    this.token = token;
  }

  close() {
    for (const stub of this.stubs) stub.close();
  }

  /**
   * Yields text as it comes; `sequences`, one for each that is asked for, have it all in the end.
   *
   * Leaving the loop over it cancels the call. `timeout`: milliseconds for all of it, tries among
   * them. Goes on behind what has come where a router is lost.
   */
  async *generate(request, sequences, timeout) {
    request = { ...request, sampling: { ...request.sampling } };
    const deadline = Date.now() + timeout;
    const metadata = new grpc.Metadata();
    const hex = (length) => randomBytes(length).toString("hex");
    metadata.set("traceparent", `00-${hex(16)}-${hex(8)}-01`);
    if (this.token) metadata.set("authorization", `Bearer ${this.token}`);
    let pause = 100;
    while (true) {
      const call = this.stubs[this.#asked].Generate(request, metadata, { deadline });
      try {
        for await (const event of call) {
          if (event.event === "accepted") {
            // Of a router that goes on, the same seed has to be asked for.
            request.sampling.seed = event.accepted.seed;
            pause = 100;
          } else if (event.event === "tokens") {
            yield sequences[event.tokens.sequence_index].add(event.tokens);
          }
        }
        return;
      } catch (error) {
        if (error.code === grpc.status.RESOURCE_EXHAUSTED) {
          pause = retryDelay(error);
        } else if (error.code === grpc.status.UNAVAILABLE) {
          pause = Math.min(2 * pause, LARGEST_PAUSE);
          this.#asked = (this.#asked + 1) % this.stubs.length;
        } else {
          throw error;
        }
        if (Date.now() + pause > deadline) throw error;
      } finally {
        call.cancel();
      }
      if (sequences.some((one) => one.tokenIds.length > 0)) {
        request.continue_from = sequences.map((one) => ({
          ids: one.tokenIds,
          finish_reason: one.reason,
        }));
      }
      await sleep(pause);
    }
  }
}

function tell(what) {
  console.log(JSON.stringify(what));
}

/** Workers give back what the generation held. */
async function cancel(client, prompt) {
  const sequence = new Sequence();
  const sampling = { max_tokens: 300, ignore_eos: true };
  for await (const _ of client.generate({ text: prompt, sampling }, [sequence], 30_000)) {
    if (sequence.tokenIds.length >= 5) break;
  }
  tell({ cancelled_after: sequence.tokenIds.length });
}

/** Every process knows the deadline; none computes anything for it that comes too late. */
async function missDeadline(client, prompt) {
  const sampling = { max_tokens: 1500, ignore_eos: true };
  try {
    for await (const _ of client.generate({ text: prompt, sampling }, [new Sequence()], 1000));
  } catch (error) {
    if (error.code === grpc.status.DEADLINE_EXCEEDED) tell({ deadline: "exceeded" });
    else throw error;
  }
}

const [protos, addresses, prompt] = process.argv.slice(2);
const client = new Client(protos, addresses.split(","), process.env.BATON_TOKEN);
const two = { max_tokens: 24, n: 2, temperature: 0.8, seed: "7", ignore_eos: true };
const sequences = [new Sequence(), new Sequence()];
for await (const text of client.generate({ text: prompt, sampling: two }, sequences, 30_000)) {
  console.error(JSON.stringify(text));
}
for (const [index, one] of sequences.entries()) {
  tell({ sequence: index, text: one.text, token_ids: one.tokenIds });
}
await cancel(client, prompt);
await missDeadline(client, prompt);
client.close();
