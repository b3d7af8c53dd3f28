//! Links the module for Node.js.

fn main() {
    napi_build::setup();
    // Threads of clients run its code after the environment that loaded it has ended.
    if std::env::var("CARGO_CFG_TARGET_OS").is_ok_and(|system| system == "linux") {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    }
}
