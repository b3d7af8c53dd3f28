//! How much a test does.

/// Chooses by `LEASEHOLD_TEST_LONG`: the first without it, the second for a night (`1`, which `scripts/test --long` sets), the third
/// before a release (`release`).
///
/// # Panics
///
/// If the variable has another value.
#[must_use]
pub fn extent<T>(usual: T, night: T, release: T) -> T {
    match std::env::var("LEASEHOLD_TEST_LONG").as_deref() {
        Err(_) => usual,
        Ok("1") => night,
        Ok("release") => release,
        Ok(other) => panic!("LEASEHOLD_TEST_LONG is 1 or release, not {other:?}"),
    }
}
