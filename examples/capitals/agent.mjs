// The same question by a program of Node.js: one process for each attempt, which posts its own reward.
import { text } from "node:stream/consumers";
import OpenAI from "openai";

const task = JSON.parse(await text(process.stdin));
const client = new OpenAI(); // OPENAI_BASE_URL and OPENAI_API_KEY are set
const reply = await client.chat.completions.create({
  model: process.env.OPENAI_MODEL,
  messages: [{ role: "user", content: `What is the capital of ${task.data.country}? Answer in one word.` }],
});

const answer = reply.choices[0].message.content ?? "";
const capital = task.data.capital;
const found = [...capital].filter((letter) => answer.includes(letter)).length;
await client.post("/reward", {
  body: { reward: found / Math.max(answer.length, capital.length), metrics: { characters: answer.length } },
});
