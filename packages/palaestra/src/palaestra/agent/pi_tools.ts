// Offers the environment's tools to pi as an extension, because pi does not support MCP. Source: docs/extensions.md of pi 0.73.
import { readFileSync } from "node:fs";

const config = JSON.parse(readFileSync(process.env.PALAESTRA_MCP_CONFIG, "utf8"));
const [server] = Object.values(config.mcpServers) as any[];

async function ask(method: string, params: object, signal?: AbortSignal): Promise<any> {
  const headers = { "Content-Type": "application/json", ...server.headers };
  const body = JSON.stringify({ jsonrpc: "2.0", id: 1, method, params });
  const response = await fetch(server.url, { method: "POST", headers, body, signal });
  const reply: any = await response.json();
  if (!reply.result) throw new Error(reply.error?.message ?? `HTTP status ${response.status}`);
  return reply.result;
}

export default async function (pi: any) {
  for (const tool of (await ask("tools/list", {})).tools) {
    pi.registerTool({
      name: tool.name,
      label: tool.name,
      description: tool.description,
      parameters: tool.inputSchema,
      async execute(_id: string, params: object, signal?: AbortSignal) {
        const result = await ask("tools/call", { name: tool.name, arguments: params }, signal);
        if (result.isError) throw new Error(result.content[0].text);
        return { content: result.content, details: {} };
      },
    });
  }
}
