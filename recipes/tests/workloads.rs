//! The flash sale and the lottery in a small size: what they count, not how long it takes.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use recipes::lottery::{Tally, Way, play};
use recipes::recipes::ROWS;
use recipes::sale::contest::{compete, table};
use recipes::sale::driver::Load;
use recipes::sale::{Contender, Retry};

fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_recipes"))
}

const LOAD: Load = Load { requests: 60, customers: 12, limit: Duration::from_secs(120) };

#[tokio::test]
async fn leasehold_sells_to_everybody_and_counts_every_sale_with_one_and_with_two_services() {
    for services in [1, 2] {
        let row = compete(program(), &Contender::Leasehold, services, LOAD, false).await.unwrap();
        assert_eq!((row.seen.sold(), row.seen.failed, row.oversold), (60, 0, 0), "{services}");
        // Two are the sale's own. Were the lock not handed on within a service, all of them would be some 18.
        assert!((2.0..12.0).contains(&row.commands_per_sale), "{}", row.commands_per_sale);
        assert!(table(&[row]).contains("| leasehold |"));
    }
}

#[tokio::test]
async fn a_recipe_that_excludes_sells_nothing_twice_under_any_policy() {
    let load = Load { requests: 8, customers: 4, ..LOAD };
    for retry in Retry::POLICIES {
        let contender = Contender::Recipe { id: "set-nx-px", retry };
        let row = compete(program(), &contender, 2, load, false).await.unwrap();
        assert_eq!((row.seen.failed, row.oversold), (0, 0), "{retry}");
    }
}

#[tokio::test]
async fn what_is_sold_twice_without_a_lock_is_noticed() {
    let load = Load { requests: 400, customers: 100, ..LOAD };
    let row = compete(program(), &Contender::Nothing, 2, load, false).await.unwrap();
    assert!(row.oversold > 0);
}

#[tokio::test]
async fn a_round_that_each_instance_draws_is_noticed() {
    let way = Way::Nothing;
    assert_eq!(play(program(), way, 3, 10).await.unwrap(), Tally { way, none: 0, once: 0, more: 10 });
}

#[tokio::test]
async fn every_recipe_can_be_the_service_s() {
    let load = Load { requests: 4, customers: 2, ..LOAD };
    for row in ROWS {
        let contender = Contender::Recipe { id: row.id, retry: Retry::Yield };
        let sold = compete(program(), &contender, 1, load, false).await.unwrap();
        assert_eq!(sold.seen.failed, 0, "{}", row.id);
    }
}

#[tokio::test]
async fn a_lottery_is_drawn_once_in_every_round() {
    for way in [Way::Recipe("set-nx-px"), Way::Recipe("hash-pubsub"), Way::Mutex, Way::OncePer] {
        let tally = play(program(), way, 3, 30).await.unwrap();
        assert_eq!(tally, Tally { way, none: 0, once: 30, more: 0 });
    }
}

#[test]
fn wrong_input_is_told_in_words() {
    let said = |words: &[&str]| {
        let output = Command::new(program()).args(words).output().unwrap();
        assert!(!output.status.success(), "{words:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    assert!(said(&["explore", "nothing"]).contains("no recipe is called 'nothing'; there are exists-set, "));
    assert!(said(&["explore", "setnx", "--in-one-step"]).contains("it has none"));
    assert!(said(&["run", "redlock", "--url", "redis://127.0.0.1"]).contains("needs 3 masters"));
    assert!(said(&["flash-sale", "--lock", "nothing"]).contains("no recipe is called"));
    assert!(said(&["flash-sale", "--lock", "setnx", "--retry", "listen"]).contains("tells nobody"));
    assert!(said(&["lottery", "--rounds", "0"]).contains("1..=100000"));
}
