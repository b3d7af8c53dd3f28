//! Spans of time as people type them: `10s`, `1m 30s`, `500ms`, or seconds with a fraction.

use std::time::Duration;

/// Max duration. A longer one is a typing error, or milliseconds in place of seconds.
const LONGEST: Duration = Duration::from_secs(100 * 365 * 86_400);

/// Reads a span.
pub(crate) fn parse(text: &str) -> Result<Duration, String> {
    let text = text.trim();
    let span = match text.parse::<f64>() {
        Ok(seconds) if seconds.is_nan() || seconds.is_sign_negative() => {
            return Err("a span of time is zero or more".to_owned());
        }
        // What does not fit is too long, infinity for example.
        Ok(seconds) => Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX),
        Err(_) => humantime::parse_duration(text)
            .map_err(|_| "write 10s, 1m30s, 500ms, or seconds such as 0.5".to_owned())?,
    };
    if span > LONGEST { Err("that is more than 100 years".to_owned()) } else { Ok(span) }
}

/// A span as people read it: two units at most.
pub(crate) fn show(span: Duration) -> String {
    let seconds = span.as_secs();
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match seconds {
        0 => format!("{} ms", span.as_millis()),
        1..60 => format!("{seconds}s"),
        60..3_600 => format!("{minutes}m {:02}s", seconds % 60),
        3_600..86_400 => format!("{hours}h {minutes:02}m"),
        _ => format!("{days}d {hours:02}h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_parsed() {
        for (text, millis) in
            [("10s", 10_000), ("1m30s", 90_000), ("500ms", 500), ("0.25", 250), (" 2 ", 2_000)]
        {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
        for text in [
            "",
            "-1",
            "-0.1s",
            "NaN",
            "-NaN",
            "inf",
            "1e30",
            "1e12",
            "200y",
            "soon",
            "5 parsecs",
            "99999999999999999999s",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn durations_are_shown_with_at_most_two_units() {
        let shown = |seconds| show(Duration::from_secs(seconds));
        assert_eq!((shown(5), shown(72)), ("5s".to_owned(), "1m 12s".to_owned()));
        assert_eq!((shown(3_725), shown(90_000)), ("1h 02m".to_owned(), "1d 01h".to_owned()));
        assert_eq!(show(Duration::from_millis(250)), "250 ms");
    }
}
