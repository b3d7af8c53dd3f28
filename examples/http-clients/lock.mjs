const call = async (path, body) => {
  const headers = { Authorization: `Bearer ${process.env.LEASEHOLD_HTTP_TOKEN}`, "Content-Type": "application/json" };
  const answer = await fetch(process.env.LEASEHOLD_URL + path, { method: "POST", headers, body: JSON.stringify(body) });
  const text = await answer.text();
  if (!answer.ok) throw new Error(text); // names the remedy
  return text && JSON.parse(text);
};
const grant = await call("/v1/locks/mutex/nightly-report/acquire", { wait_ms: 60_000, ttl_ms: 30_000 });
console.log("token", grant.token); // the work; it must end within expires_in_ms, or renew the lease
await call("/v1/locks/mutex/nightly-report/release", { lease: grant.lease });
