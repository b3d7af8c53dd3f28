const call = async (path, body) => {
  const headers = { Authorization: `Bearer ${process.env.LEASEHOLD_HTTP_TOKEN}`, "Content-Type": "application/json" };
  const answer = await fetch(process.env.LEASEHOLD_URL + path, { method: "POST", headers, body: JSON.stringify(body) });
  if (!answer.ok) throw new Error(await answer.text()); // names the remedy
  return answer.json();
};
const request_id = crypto.randomUUID();
let grant = {};
while (!grant.lease) { // it keeps its place in the queue
  grant = await call("/v1/locks/mutex/nightly-report/acquire", { request_id, wait_ms: 20_000 });
}
console.log("token", grant.token_text); // the work; it must end within expires_in_ms, or renew the lease
await call("/v1/leases/release", { leases: [grant.lease] });
