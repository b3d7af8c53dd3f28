//! Redis: being built. The scripts and what goes in and out of them come first, compared with the model.

mod keys;
mod script;

#[cfg(test)]
mod tests;
