//! HTTP requests to `leasehold serve`: paths, queries and bodies, several to one server.

#![no_main]

use std::sync::LazyLock;

use arbitrary::{Arbitrary, Result, Unstructured};
use leasehold_serve::fuzzing::{AnyRequest, members, send};
use libfuzzer_sys::fuzz_target;
use tokio::runtime::{Builder, Runtime};

static RUNTIME: LazyLock<Runtime> =
    LazyLock::new(|| Builder::new_current_thread().enable_time().build().expect("a runtime"));

static MEMBERS: LazyLock<Vec<String>> = LazyLock::new(members);

#[derive(Debug)]
struct Input {
    method: &'static str,
    target: String,
    is_json: bool,
    body: String,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        let method = *input.choose(&["POST", "POST", "GET", "DELETE", "PUT"])?;
        let target = match input.int_in_range(0..=4)? {
            0..=2 => {
                let kind = *input.choose(&["mutex", "rw", "semaphore", "election", "other"])?;
                let name = escaped(*input.choose(&["a", "b", "", "\u{7f}"])?);
                let command = *input.choose(&["/acquire", "/acquire", "/force-release", "", "/x"])?;
                format!("/v1/locks/{kind}/{name}{command}")
            }
            3 => {
                (*input.choose(&["/v1/leases/renew", "/v1/leases/release", "/v1/locks/acquire"])?).to_owned()
            }
            _ => format!("/{}", input.arbitrary::<&str>()?),
        };
        let body = match input.int_in_range(0..=2)? {
            0 => input.arbitrary::<String>()?,
            _ => {
                let count = input.int_in_range(0..=3)?;
                let members: Vec<String> = (0..count).map(|_| member(input)).collect::<Result<_>>()?;
                format!("{{{}}}", members.join(","))
            }
        };
        Ok(Self { method, target, is_json: input.ratio(7, 8)?, body })
    }
}

/// A member of a JSON object, usually one that the server knows.
fn member(input: &mut Unstructured<'_>) -> Result<String> {
    let name = if input.ratio(1, 16)? { "x" } else { input.choose(MEMBERS.as_slice())?.as_str() };
    let value = match input.int_in_range(0..=6)? {
        0 => input.arbitrary::<u64>()?.to_string(),
        1 => input.int_in_range(-1..=20_000)?.to_string(),
        2 => format!("\"{}\"", *input.choose(&["read", "write", "upgradable", "a", ""])?),
        3 => (*input.choose(&["null", "true", "1.5", "[]", "{}"])?).to_owned(),
        // The id of a request, and those of leases.
        4 => "\"0123456789abcdef\"".to_owned(),
        5 => {
            let secret = "0".repeat(16 + 16 * input.int_in_range(0..=3)?);
            let name = *input.choose(&["61", "62", "zz"])?;
            format!("[\"a\",\"b\",\"lease1.mutex.{name}.10000.0.60000.1.{secret}\"]")
        }
        _ => format!("{:?}", input.arbitrary::<&str>()?),
    };
    Ok(format!("\"{name}\":{value}"))
}

/// The text with every byte escaped as in an address.
fn escaped(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

fuzz_target!(|inputs: [Input; 4]| {
    let requests = inputs.iter().map(|input| AnyRequest {
        method: input.method,
        target: &input.target,
        is_json: input.is_json,
        body: input.body.as_bytes(),
    });
    RUNTIME.block_on(send(requests));
});
