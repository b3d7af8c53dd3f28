// A service that ships orders. Two requests for one order never run at the same time, in any of its processes.
//
//   npm install express ./target/node/leasehold-0.1.0.tgz
//   PORT=8080 node orders.mjs            # STORE=redis://127.0.0.1 for several hosts
//   curl -X POST localhost:8080/orders/42/ship

import express from "express";
import { connect, LeaseLost, releaseOnSignals, Timeout, Unavailable } from "leasehold";

const client = await connect(process.env.STORE ?? "sqlite:orders.db");
releaseOnSignals(client);

const app = express();

app.post("/orders/:id/ship", async (request, response) => {
  // The number, and not its text: 42 and 042 are one order.
  const order = Number(request.params.id);
  if (!Number.isSafeInteger(order)) return response.status(404).end();
  const shipped = await client.using(`orders:${order}`, { wait: 1_000 }, (lease) => ship(order, lease));
  response.json(shipped);
});

// The work, which ends when the lease is lost. The token goes along with every write.
async function ship(order, lease) {
  const milliseconds = Number(process.env.WORK ?? 3_000);
  await new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    lease.signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(lease.signal.reason);
    });
  });
  return { order, token: String(lease.token) };
}

app.use((error, request, response, next) => {
  if (error instanceof Timeout) return response.status(409).json({ detail: "the order is being shipped" });
  if (error instanceof Unavailable || error instanceof LeaseLost) return response.status(503).json({ detail: "try again" });
  next(error);
});

const server = app.listen(Number(process.env.PORT ?? 8080), "127.0.0.1", () => console.log(`listens on ${server.address().port}`));
