// Task for OpenAI's agents in JavaScript: a loop of two tool calls that ends, by either API.

import {
  Agent,
  OpenAIChatCompletionsModel,
  OpenAIResponsesModel,
  Runner,
  setTracingDisabled,
  tool,
} from '@openai/agents'
import OpenAI from 'openai'
import { z } from 'zod'

const QUESTION = 'What is the weather in Paris, and what is 12 plus 30?'
const [address, name, task] = process.argv.slice(2)

setTracingDisabled(true)
const client = new OpenAI({ baseURL: `${address}/v1`, apiKey: 'any', maxRetries: 0 })
const tools = [
  tool({
    name: 'get_weather',
    description: 'Returns the weather of a city.',
    parameters: z.object({ city: z.string() }),
    execute: () => 'sunny, 21 degrees',
  }),
  tool({
    name: 'add',
    description: 'Adds two numbers.',
    parameters: z.object({ a: z.int(), b: z.int() }),
    execute: ({ a, b }) => String(a + b),
  }),
]

async function loop(Model, stream) {
  const agent = new Agent({
    name: 'helper',
    instructions: 'You are a helpful assistant.',
    model: new Model(client, name),
    modelSettings: { temperature: 0 },
    tools,
  })
  const result = await new Runner().run(agent, QUESTION, { maxTurns: 5, stream })
  if (stream) await result.completed
  const items = result.newItems.filter(item => item.type === 'tool_call_item')
  const calls = items.map(({ rawItem }) => [rawItem.name, JSON.parse(rawItem.arguments)])
  return { calls, answer: result.finalOutput }
}

const TASKS = {
  tools: () => loop(OpenAIChatCompletionsModel, false),
  streamed_tools: () => loop(OpenAIChatCompletionsModel, true),
  responses_tools: () => loop(OpenAIResponsesModel, false),
  responses_streamed_tools: () => loop(OpenAIResponsesModel, true),
}
console.log(JSON.stringify(await TASKS[task]()))
