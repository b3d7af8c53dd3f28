//! The words in which articles describe a recipe or a problem, in English and Chinese, with the recipes that they mean.

use std::fmt::Write as _;

/// One line of the map.
pub struct Article {
    /// What an article in English says.
    pub english: &'static str,
    /// What an article in Chinese says.
    pub chinese: &'static str,
    /// The recipes, as `list` names them.
    pub recipes: &'static [&'static str],
}

const fn article(english: &'static str, chinese: &'static str, recipes: &'static [&'static str]) -> Article {
    Article { english, chinese, recipes }
}

/// Recipes first, then problems.
pub static ARTICLES: &[Article] = &[
    article("check with EXISTS, then SET", "先用 EXISTS 判断，再 SET", &["exists-set"]),
    article("SETNX to lock, DEL to unlock", "SETNX 加锁，DEL 解锁", &["setnx"]),
    article(
        "SETNX, then EXPIRE: two commands, not atomic",
        "SETNX + EXPIRE 两条命令（非原子操作）",
        &["setnx-expire"],
    ),
    article(
        "SETNX + EXPIRE in one Lua script",
        "用 Lua 脚本把 SETNX 和 EXPIRE 合成一步",
        &["lua-setnx-expire", "lua-setnx-token"],
    ),
    article(
        "SET key value EX n NX, DEL in the finally block; Spring setIfAbsent(key, value, timeout)",
        "SET key value EX n NX，finally 里直接 DEL；setIfAbsent(key, value, 超时时间)",
        &["set-nx-ex"],
    ),
    article(
        "unique value (UUID), GET and compare, then DEL: two commands",
        "value 存 UUID，先 GET 比较再 DEL（判断和删除不是原子操作）",
        &["set-nx-px-get-del"],
    ),
    article(
        "SET NX PX with a random value, Lua script to unlock: the single-instance lock of the Redis documentation",
        "SET NX PX + 唯一值，Lua 脚本解锁（单机版的“正确实现”）",
        &["set-nx-px"],
    ),
    article(
        "expiry time as the value; when it has passed, DEL and SETNX",
        "value 存过期时间戳，过期后 DEL 再 SETNX",
        &["timestamp-del"],
    ),
    article(
        "expiry time as the value; when it has passed, GETSET and compare",
        "SETNX + GETSET，value 存过期时间戳",
        &["timestamp-getset", "timestamp-getset-expire"],
    ),
    article(
        "reentrant lock: hash, HINCRBY, owner id",
        "可重入锁：Hash + HINCRBY，field 存线程标识",
        &["reentrant-hash"],
    ),
    article(
        "reentrant lock: count in a ThreadLocal, renewal thread",
        "可重入锁：ThreadLocal 计数，后台线程续期",
        &["local-count"],
    ),
    article(
        "Redisson: RLock, watchdog, pub/sub",
        "Redisson：RLock，看门狗（watchdog）自动续期，发布订阅",
        &["hash-pubsub"],
    ),
    article(
        "Redlock: majority of N independent masters",
        "红锁（Redlock）：N 个独立主节点，过半成功",
        &["redlock"],
    ),
    article("read-write lock with two keys", "读写锁：读 key 和写 key 两个 key", &["rw-two-keys"]),
    article(
        "read-write lock in one hash, client timestamps",
        "读写锁：一个 Hash，read / write 两个 field 存时间戳",
        &["rw-hash"],
    ),
    article(
        "deadlock: the holder crashes before it sets the expiry",
        "死锁：加锁后宕机，没来得及设置过期时间",
        &["setnx", "setnx-expire"],
    ),
    article(
        "deleting another client's lock",
        "误删别人的锁",
        &["setnx-expire", "lua-setnx-expire", "set-nx-ex", "set-nx-px-get-del"],
    ),
    article(
        "the lock expires before the work is done; renewal, lease extension",
        "锁过期了业务还没执行完；锁续期",
        &["set-nx-px", "lua-setnx-token", "local-count", "hash-pubsub"],
    ),
    article(
        "clock drift, clock jump, a master that loses its data",
        "时钟漂移、时钟跳跃、主节点重启丢锁",
        &["redlock", "timestamp-getset", "rw-hash"],
    ),
];

/// The map as a Markdown table. A recipe links to its section.
#[must_use]
pub fn table() -> String {
    let mut out = String::from("| the article says | 文章里的说法 | recipe |\n|---|---|---|\n");
    for Article { english, chinese, recipes } in ARTICLES {
        let links: Vec<_> = recipes.iter().map(|id| format!("[`{id}`](#{id})")).collect();
        let _ = writeln!(out, "| {english} | {chinese} | {} |", links.join(", "));
    }
    out
}

/// The map as text for a terminal.
#[must_use]
pub fn text() -> String {
    let mut out = String::new();
    for Article { english, chinese, recipes } in ARTICLES {
        let _ = writeln!(out, "{english}\n{chinese}\n    {}\n", recipes.join(", "));
    }
    out
}
