"use strict";
// The address of the server of an ioredis client, from its options. An option that would be lost is refused.

const { InvalidInput, Unsupported } = require("./errors");

/** How the client connects, waits and answers, which the engine does in its own way. */
const IGNORED = new Set([
  "autoPipeliningIgnoredCommands",
  "autoResendUnfulfilledCommands",
  "autoResubscribe",
  "blockingTimeout",
  "blockingTimeoutGrace",
  "clientInfoTag",
  "commandTimeout",
  "connectTimeout",
  "connectionName",
  "disableClientInfo",
  "disconnectTimeout",
  "dropBufferSupport",
  "enableAutoPipelining",
  "enableOfflineQueue",
  "enableReadyCheck",
  "failoverDetector",
  "family",
  "keepAlive",
  "lazyConnect",
  "maxLoadingRetryTime",
  "maxRetriesPerRequest",
  "monitor",
  "noDelay",
  "offlineQueue",
  "protocol",
  "reconnectOnError",
  "replyMapping",
  "retryStrategy",
  "scripts",
  "sentinelCommandTimeout",
  "sentinelMaxConnections",
  "sentinelReconnectStrategy",
  "sentinelRetryStrategy",
  "showFriendlyErrorStack",
  "socketTimeout",
  "stringNumbers",
  "updateSentinels",
]);

/** What an address can say. */
const USED = new Set([
  "host",
  "port",
  "path",
  "username",
  "password",
  "db",
  "tls",
  "keyPrefix",
  "sentinels",
  "name",
  "role",
  "sentinelUsername",
  "sentinelPassword",
  "enableTLSForSentinelMode",
]);

/** Options whose default is kept, and which would lead elsewhere otherwise. */
const EMPTY = new Set(["natMap", "readOnly", "preferredSlaves", "Connector"]);

function optionsOf(client) {
  if (client?.isCluster === true) {
    throw new Unsupported("a client of a Redis Cluster cannot be used: connect to redis-cluster://… with leasehold's own API");
  }
  const options = client?.options;
  if (options === null || typeof options !== "object" || typeof client.evalsha !== "function") {
    throw new InvalidInput("Redlock gets clients of ioredis");
  }
  for (const [name, value] of Object.entries(options)) {
    if (IGNORED.has(name) || USED.has(name) || value === undefined || value === null || value === false) continue;
    if (EMPTY.has(name) && typeof value === "object" && Object.keys(value).length === 0) continue;
    throw new Unsupported(`the option ${name} of an ioredis client cannot be used: give the server by the setting addresses`);
  }
  if (options.role !== undefined && options.role !== "master") {
    throw new Unsupported("locks are made at a master: the option role of an ioredis client is another one");
  }
  return options;
}

function prefixOf(client) {
  return String(optionsOf(client).keyPrefix ?? "");
}

function addressOf(client) {
  const options = optionsOf(client);
  const { host, port, path, sentinels, db } = options;
  const database = db ? String(db) : "";
  const login = loginOf(options.username, options.password);
  const isTls = hasTls(options);
  if (Array.isArray(sentinels) && sentinels.length > 0) {
    const hosts = sentinels.map((sentinel) => hostOf(sentinel.host, sentinel.port ?? 26379)).join(",");
    const parameters = new URLSearchParams();
    if (isTls) parameters.set("tls", "true");
    if (options.sentinelUsername) parameters.set("sentinel_user", options.sentinelUsername);
    if (options.sentinelPassword) parameters.set("sentinel_password", options.sentinelPassword);
    const service = encodeURIComponent(options.name);
    return `redis-sentinel://${login}${hosts}/${service}${database && `/${database}`}${query(parameters)}`;
  }
  if (path) {
    const parameters = new URLSearchParams();
    if (options.username) parameters.set("user", options.username);
    if (options.password) parameters.set("pass", options.password);
    if (database) parameters.set("db", database);
    return `redis+unix://${encodeURI(path)}${query(parameters)}`;
  }
  return `${isTls ? "rediss" : "redis"}://${login}${hostOf(host, port)}${database && `/${database}`}`;
}

function query(parameters) {
  const text = parameters.toString();
  return text === "" ? "" : `?${text}`;
}

function loginOf(user, password) {
  if (!password) return "";
  return `${encodeURIComponent(user ?? "")}:${encodeURIComponent(password)}@`;
}

function hostOf(host, port) {
  return `${host.includes(":") ? `[${host}]` : host}:${port}`;
}

/** TLS as an address has it: with the system's authorities, for the name of the host. */
function hasTls({ tls, host, sentinels, enableTLSForSentinelMode }) {
  if (!tls) return false;
  if (Array.isArray(sentinels) && !enableTLSForSentinelMode) {
    throw new Unsupported("TLS to the servers alone, and not to the sentinels, cannot be used: give the address by the setting addresses");
  }
  for (const [name, value] of Object.entries(tls === true ? {} : tls)) {
    const isSame = (name === "servername" && value === host) || (name === "rejectUnauthorized" && value === true) || value === undefined;
    if (!isSame) {
      throw new Unsupported(`the option tls.${name} of an ioredis client cannot be used: give the address by the setting addresses, as rediss://…?ca=PATH`);
    }
  }
  return true;
}

module.exports = { addressOf, prefixOf };
