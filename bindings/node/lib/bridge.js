"use strict";
// Locks of other libraries that a lock takes too, so that programs which still use those are excluded. docs/bridges.md says what each needs.

const bridge = (name, ...terms) => Object.freeze({ terms: Object.freeze([name, ...terms]) });
const one = (name) => (key) => bridge(name, key);

module.exports = Object.freeze({
  redisPy: one("redis_py"),
  pottery: one("pottery"),
  pythonRedisLock: one("python_redis_lock"),
  setNxPx: one("set_nx_px"),
  redsync: one("redsync"),
  nodeRedlock: one("node_redlock"),
  rslock: one("rslock"),
  bsmRedislock: one("bsm_redislock"),
  rueidislock: one("rueidislock"),
  dapr: (appId, resource) => bridge("dapr", appId, resource),
  springIntegration: (registry, name) => bridge("spring_integration", registry, name),
  redissonLock: one("redisson_lock"),
  redissonFencedLock: one("redisson_fenced_lock"),
  redissonReadWriteLock: one("redisson_read_write_lock"),
  redlock: (servers, key) => bridge("redlock", key, ...servers),
  redissonRedlock: (servers, name) => bridge("redisson_redlock", name, ...servers),
});
