// The official `openai` package for Node against kvist. Arguments: base URL, key. Says `ok NAME` for each thing that holds.
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
const messages = [{ role: "user", content: "Count: one two three" }];
const checks = {
  async models() {
    const page = await client.models.list();
    assert.deepEqual(page.data.map((model) => model.id), ["fake"]);
    assert.equal((await client.models.retrieve("fake")).owned_by, "kvist");
  },
  async chat() {
    const whole = await client.chat.completions.create({ model: "fake", messages, n: 2 });
    assert.deepEqual(whole.choices.map((choice) => choice.finish_reason), ["stop", "stop"]);
    const texts = ["", ""];
    let usage = null;
    const stream = await client.chat.completions.create({
      model: "fake", messages, n: 2, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) {
      usage = chunk.usage ?? usage;
      for (const choice of chunk.choices) texts[choice.index] += choice.delta.content ?? "";
    }
    assert.deepEqual(texts, whole.choices.map((choice) => choice.message.content));
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
    const sources = Object.values(usage.kvist.prompt_tokens_by_source);
    assert.equal(sources.reduce((sum, count) => sum + count, 0), usage.prompt_tokens);
  },
  async streamHelper() {
    const runner = client.chat.completions.stream({ model: "fake", messages, logprobs: true, top_logprobs: 1 });
    let text = "";
    runner.on("content", (part) => { text += part; });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
    assert.ok(final.choices[0].logprobs.content.length > 10);
  },
  async comments() {
    const options = { headers: { "X-Kvist-Events": "1" } };
    const stream = await client.chat.completions.create({ model: "fake", messages, stream: true }, options);
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0].delta.content ?? "";
    const whole = await client.chat.completions.create({ model: "fake", messages });
    assert.equal(text, whole.choices[0].message.content);
  },
  async completions() {
    const fields = { model: "fake", prompt: "hi", max_tokens: 200, stop: ["漢"] };
    const whole = await client.completions.create({ ...fields, logprobs: 1, echo: true });
    assert.ok(whole.choices[0].text.endsWith("caché "));
    assert.equal(whole.choices[0].logprobs.tokens.length, whole.usage.completion_tokens + whole.usage.prompt_tokens);
    let text = "hi";
    for await (const chunk of await client.completions.create({ ...fields, stream: true })) text += chunk.choices[0].text;
    assert.equal(text, whole.choices[0].text);
    const many = await client.completions.create({ model: "fake", prompt: ["a", "b"], n: 2, max_tokens: 5 });
    assert.deepEqual(many.choices.map((choice) => choice.index), [0, 1, 2, 3]);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ model: "fake", messages, temperature: 9000 }), (error) =>
      error instanceof OpenAI.BadRequestError && error.param === "temperature" && error.type === "invalid_request_error");
    await assert.rejects(client.chat.completions.create({ model: "gpt-9", messages }), (error) =>
      error instanceof OpenAI.NotFoundError && error.code === "model_not_found");
    await assert.rejects(client.completions.create({ model: "fake", prompt: "x".repeat(600) }), (error) =>
      error instanceof OpenAI.BadRequestError && error.code === "context_length_exceeded");
    await assert.rejects(client.embeddings.create({ model: "fake", input: "twig" }), OpenAI.BadRequestError);
    const stranger = new OpenAI({ baseURL, apiKey: "wrong", maxRetries: 0 });
    await assert.rejects(stranger.models.list(), OpenAI.AuthenticationError);
  },
  async leaving() {
    const stream = await client.completions.create({
      model: "fake", prompt: "hi", max_tokens: 400, stream: true, ignore_eos: true,
    });
    for await (const chunk of stream) {
      assert.equal(chunk.object, "text_completion");
      break; // the package closes the connection
    }
  },
};
for (const [name, check] of Object.entries(checks)) {
  await check();
  console.log(`ok ${name}`);
}
