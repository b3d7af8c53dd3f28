// Acquires, renews and releases a lock by the generated types: `tsc` knows each path, member and answer.
import createClient from "openapi-fetch";
import type { paths } from "./api.js";

const client = createClient<paths>({
  baseUrl: process.env["LEASEHOLD_URL"] ?? "http://127.0.0.1:8430",
  headers: { Authorization: `Bearer ${process.env["LEASEHOLD_HTTP_TOKEN"]}` },
});
const lock = { path: { kind: "mutex", name: "nightly-report" } } as const;

async function acquire(wait_ms: number) {
  const request_id = crypto.randomUUID();
  for (;;) {
    const sent = performance.now();
    const { data, error } = await client.POST("/v1/locks/{kind}/{name}/acquire", {
      params: lock,
      body: { request_id, wait_ms },
    });
    if (error) throw new Error(`${error.code}: ${error.detail}`);
    if ("lease" in data) return { ...data, good_until: sent + data.expires_in_ms };
  }
}

async function renew(lease: string) {
  const sent = performance.now();
  const { data, error } = await client.POST("/v1/leases/renew", { body: { leases: [lease] } });
  if (error) throw new Error(`${error.code}: ${error.detail}`);
  const outcome = data.leases[0];
  if (outcome?.outcome !== "renewed") throw new Error(`the lease is not renewed: ${outcome?.outcome}`);
  return sent + outcome.expires_in_ms;
}

async function release(lease: string) {
  const { data, error } = await client.POST("/v1/leases/release", { body: { leases: [lease] } });
  if (error) throw new Error(`${error.code}: ${error.detail}`);
  return data.leases[0]?.outcome;
}

const grant = await acquire(20_000);
console.log("token", grant.token_text);
console.log("renewed", (await renew(grant.lease)) >= grant.good_until);
const busy = await client.POST("/v1/locks/{kind}/{name}/acquire", { params: lock, body: {} });
console.log("another request is", busy.error?.code);
const { data } = await client.GET("/v1/locks/{kind}/{name}", { params: lock });
console.log("the holder is shown", data?.holders.some((holder) => holder.token === grant.token));
console.log("release:", await release(grant.lease), await release(grant.lease));
