//! Splits a server's byte stream into RESP2 and RESP3 frames.

/// The parser of one connection's replies.
pub(super) enum Frames {
    /// The bytes of an incomplete frame.
    Read(Vec<u8>),
    /// The stream is not RESP, for example TLS, or is not parsed.
    Unread,
}

impl Default for Frames {
    fn default() -> Self {
        Self::Read(Vec::new())
    }
}

/// What some bytes begin with.
#[derive(Debug, PartialEq)]
enum Found {
    Frame(usize),
    Part,
    SomethingElse,
}

impl Frames {
    /// The bytes to forward, and the number of messages dropped because they contain the unwanted bytes.
    pub(super) fn pass(&mut self, piece: &[u8], unwanted: Option<&[u8]>) -> (Vec<u8>, usize) {
        let Self::Read(rest) = self else { return (piece.to_vec(), 0) };
        rest.extend_from_slice(piece);
        let (mut at, mut passed, mut dropped) = (0, Vec::new(), 0);
        loop {
            match find(&rest[at..]) {
                Found::Frame(length) => {
                    let frame = &rest[at..at + length];
                    if unwanted.is_some_and(|unwanted| is_message(frame) && contains(frame, unwanted)) {
                        dropped += 1;
                    } else {
                        passed.extend_from_slice(frame);
                    }
                    at += length;
                }
                Found::Part => {
                    rest.drain(..at);
                    return (passed, dropped);
                }
                Found::SomethingElse => {
                    passed.extend_from_slice(&rest[at..]);
                    *self = Self::Unread;
                    return (passed, dropped);
                }
            }
        }
    }
}

fn find(bytes: &[u8]) -> Found {
    // Number of values to read, and the start of the next one.
    let (mut left, mut at) = (1_usize, 0_usize);
    while left > 0 {
        let Some(kind) = bytes.get(at) else { return Found::Part };
        if !b"+-:,#_($=!*~>%|".contains(kind) {
            return Found::SomethingElse;
        }
        let Some(end) = bytes[at..].windows(2).position(|pair| pair == b"\r\n") else { return Found::Part };
        let count = std::str::from_utf8(&bytes[at + 1..at + end]).ok().and_then(|text| text.parse().ok());
        at += end + 2;
        left -= 1;
        // A count of -1 is RESP2's null, with nothing behind it.
        let Some(count) = count.or_else(|| (!b"$=!*~>%|".contains(kind)).then_some(0_i64)) else {
            return Found::SomethingElse;
        };
        let count = usize::try_from(count).ok();
        match (kind, count) {
            (b'$' | b'=' | b'!', Some(length)) => at += length + 2,
            (b'*' | b'~' | b'>', Some(count)) => left += count,
            (b'%', Some(count)) => left += 2 * count,
            // Said about the value that follows it.
            (b'|', Some(count)) => left += 2 * count + 1,
            _ => {}
        }
    }
    if at <= bytes.len() { Found::Frame(at) } else { Found::Part }
}

/// Whether a frame is a push, or a pub/sub message of RESP2. Confirmations of subscriptions are pushes too, so the unwanted bytes
/// must not match them.
fn is_message(frame: &[u8]) -> bool {
    frame.starts_with(b">")
        || [&b"*3\r\n$7\r\nmessage\r\n"[..], b"*4\r\n$8\r\npmessage\r\n", b"*3\r\n$8\r\nsmessage\r\n"]
            .iter()
            .any(|begin| frame.starts_with(begin))
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    part.is_empty() || bytes.windows(part.len()).any(|window| window == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRAMES: &[&[u8]] = &[
        b"+OK\r\n",
        b"-ERR no\r\n",
        b":-1\r\n",
        b"$-1\r\n",
        b"*-1\r\n",
        b"_\r\n",
        b"$0\r\n\r\n",
        b"$4\r\n\r\n\r\n\r\n",
        b"*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
        b"%1\r\n+a\r\n*0\r\n",
        b"|1\r\n+ttl\r\n:3\r\n#t\r\n",
        b">3\r\n$7\r\nmessage\r\n$1\r\na\r\n$5\r\nhello\r\n",
        b"*3\r\n$7\r\nmessage\r\n$1\r\na\r\n$5\r\nhello\r\n",
    ];

    #[test]
    fn every_type_of_frame_is_found_whole_and_not_in_part() {
        for frame in FRAMES {
            let text = String::from_utf8_lossy(frame);
            assert_eq!(find(&[frame, &b"+next"[..]].concat()), Found::Frame(frame.len()), "{text:?}");
            for end in 0..frame.len() {
                assert_eq!(find(&frame[..end]), Found::Part, "{text:?} up to {end}");
            }
        }
    }

    #[test]
    fn only_messages_with_the_unwanted_bytes_are_dropped_in_pieces_of_any_size() {
        let all = FRAMES.concat();
        let kept = FRAMES[..FRAMES.len() - 2].concat();
        for size in 1..all.len() {
            for (unwanted, expected, count) in [(&b"hello"[..], &kept, 2), (b"ERR", &all, 0)] {
                let (mut frames, mut passed, mut dropped) = (Frames::default(), Vec::new(), 0);
                for piece in all.chunks(size) {
                    let (more, fewer) = frames.pass(piece, Some(unwanted));
                    passed.extend(more);
                    dropped += fewer;
                }
                assert_eq!((passed, dropped), (expected.clone(), count), "in pieces of {size}");
            }
        }
    }

    #[test]
    fn a_stream_that_is_not_resp_passes_unchanged() {
        let mut frames = Frames::default();
        let mut passed = Vec::new();
        for piece in [&b"+OK\r\n\x16\x03"[..], b"+half", b"*x\r\n"] {
            passed.extend(frames.pass(piece, Some(b"")).0);
        }
        assert_eq!(passed, b"+OK\r\n\x16\x03+half*x\r\n");
    }
}
