//! Every published recipe for a lock on Redis, running, with what breaks it.
//!
//! A recipe is a plain async function over a handle that takes one step at a time ([`redis`], [`recipe`]); the published
//! ones are in [`recipes`]. The [`explorer`] runs them in every interleaving on real servers, and [`report`] writes down
//! what it finds. Nothing here is for use: what to use instead is `leasehold`.

#![forbid(unsafe_code)]

pub mod args;
pub mod explorer;
pub mod lottery;
pub mod outcome;
pub mod progress;
pub mod real;
pub mod recipe;
pub mod recipes;
pub mod redis;
pub mod report;
pub mod run;
pub mod sale;
pub mod timeline;
pub mod verdict;
mod worker;

/// The example in the repository's README is a test. It is here because the library's package has no file of the repository.
#[cfg(doctest)]
#[doc = include_str!("../../README.md")]
struct Readme;

/// As [`Readme`].
#[cfg(doctest)]
#[doc = include_str!("../../README.zh-CN.md")]
struct ChineseReadme;
