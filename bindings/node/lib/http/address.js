"use strict";
// Addresses of servers: `http://HOST[:PORT][/PREFIX]`, `https://…`, `unix:PATH`; several hosts are separated by commas.

const { InvalidInput } = require("../errors");

const TOKEN_VARIABLE = "LEASEHOLD_HTTP_TOKEN";
const PRINTABLE = /^[\x21-\x7e]*$/;

/**
 * The servers of an address, all of which have the same store.
 * @returns {{ host: string, port: number, isTls: boolean, prefix: string, socket: string | null, authority: string, text: string }[]}
 */
function parse(address) {
  if (address.startsWith("unix:")) {
    const path = address.startsWith("unix://") ? address.slice(7) : address.slice(5);
    if (/[?&#]token=/.test(path)) throw new InvalidInput("the address of a server has no parameters: its token is the option token");
    if (path === "" || path.includes("\0")) {
      throw new InvalidInput("the address has no path: unix:/run/leasehold/serve.sock");
    }
    return [{ host: "", port: 0, isTls: false, prefix: "", socket: path, authority: "localhost", text: `unix:${path}` }];
  }
  const found = /^(https?):\/\/([^/]*)(\/.*)?$/s.exec(address);
  if (found === null) throw new InvalidInput("the address of a server begins with http://, https:// or unix:");
  const [, scheme, hosts, prefix = ""] = found;
  // It is not repeated here: it may have a password.
  if (hosts.includes("@")) {
    throw new InvalidInput(`the address has a user or a password; a server wants a token: the option token, or ${TOKEN_VARIABLE}`);
  }
  if (/[?#\s\p{Cc}]/u.test(address)) {
    // Not repeated either: a token may be among them.
    throw new InvalidInput("the address of a server has neither parameters nor spaces; its token is the option token");
  }
  return hosts.split(",").map((host) => server(scheme, host, prefix.replace(/\/+$/, "")));
}

function server(scheme, given, prefix) {
  let url;
  try {
    url = new URL(`${scheme}://${given}`);
  } catch {
    throw new InvalidInput("the address of a server has an invalid host");
  }
  if (given === "" || url.hostname === "") throw new InvalidInput("the address of a server has an empty host");
  const isTls = scheme === "https";
  return {
    host: url.hostname.replace(/^\[|\]$/g, ""),
    port: Number(url.port) || (isTls ? 443 : 80),
    isTls,
    prefix,
    socket: null,
    authority: url.host,
    text: `${scheme}://${url.host}${prefix}`,
  };
}

/** The bearer token that was given, or that of the environment. */
function tokenOf(given) {
  const token = (given ?? process.env[TOKEN_VARIABLE] ?? "").trim();
  // The value itself is never shown.
  if (!PRINTABLE.test(token)) throw new InvalidInput("the token has characters that no token has");
  return token === "" ? null : token;
}

module.exports = { TOKEN_VARIABLE, parse, tokenOf };
