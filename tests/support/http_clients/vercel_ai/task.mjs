// Task for Vercel's AI SDK: tool calls to the answer, and two turns, by each of its providers.

import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const QUESTION = 'What is the weather in Paris, and what is 12 plus 30?'
const [address, name, task, provider] = process.argv.slice(2)
const options = { baseURL: `${address}/v1`, apiKey: 'any' }
const MODELS = {
  // Its default: the Responses API. The second request names items that the router has stored.
  openai: () => createOpenAI(options)(name),
  openai_chat: () => createOpenAI(options).chat(name),
  openai_compatible: () => createOpenAICompatible({ ...options, name: 'baton' })(name),
  anthropic: () => createAnthropic(options)(name),
}
const shared = { model: MODELS[provider](), temperature: 0, maxRetries: 0 }
const tools = {
  get_weather: tool({
    inputSchema: z.object({ city: z.string() }),
    execute: () => 'sunny, 21 degrees',
  }),
  add: tool({
    inputSchema: z.object({ a: z.int(), b: z.int() }),
    execute: ({ a, b }) => String(a + b),
  }),
}

async function streamed(request) {
  const result = streamText({ ...request, onError: ({ error }) => { throw error } })
  await result.consumeStream()
  return { steps: await result.steps, text: await result.text, response: await result.response }
}

async function loop(ask) {
  const result = await ask({ ...shared, tools, prompt: QUESTION, stopWhen: stepCountIs(5) })
  const calls = result.steps.flatMap(step => step.toolCalls.map(call => [call.toolName, call.input]))
  return { calls, answer: result.text }
}

async function turns(ask) {
  const first = { role: 'user', content: 'Hello!' }
  const said = await ask({ ...shared, messages: [first] })
  const messages = [first, ...said.response.messages, { role: 'user', content: QUESTION }]
  const { calls, answer } = await loop(({ prompt, ...rest }) => ask({ ...rest, messages }))
  return { greeting: said.text, calls, answer }
}

const TASKS = {
  tools: () => loop(generateText),
  streamed_tools: () => loop(streamed),
  turns: () => turns(generateText),
  streamed_turns: () => turns(streamed),
}
console.log(JSON.stringify(await TASKS[task]()))
