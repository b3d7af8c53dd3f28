//! The names, units and meanings of the metrics. They are a stable interface: `docs/metrics.md` has the same table, and a test
//! compares the two.

use metrics::{Unit, describe_counter, describe_gauge, describe_histogram};

pub(super) const ACQUISITIONS: &str = "leasehold_acquisitions_total";
pub(super) const WAIT: &str = "leasehold_wait_seconds";
pub(super) const HOLD: &str = "leasehold_hold_seconds";
pub(super) const HANDOFF: &str = "leasehold_handoff_seconds";
pub(super) const LEASES_HELD: &str = "leasehold_leases_held";
pub(super) const ATTEMPTS_WAITING: &str = "leasehold_attempts_waiting";
pub(super) const LOCAL_HANDOFFS: &str = "leasehold_local_handoffs_total";
pub(super) const RENEWALS: &str = "leasehold_renewals_total";
pub(super) const RENEWAL: &str = "leasehold_renewal_seconds";
pub(super) const LEASES_LOST: &str = "leasehold_leases_lost_total";
pub(super) const RECONNECTS: &str = "leasehold_reconnects_total";
pub(super) const COMMANDS_IN_FLIGHT: &str = "leasehold_commands_in_flight";
pub(super) const COMMAND: &str = "leasehold_command_seconds";
pub(super) const CLOCK_OFFSET: &str = "leasehold_clock_offset_seconds";

pub(super) fn describe() {
    let (count, seconds) = (Unit::Count, Unit::Seconds);
    describe_counter!(ACQUISITIONS, count, "Attempts to acquire a lock that have ended, by outcome");
    describe_histogram!(WAIT, seconds, "Time from the call to the grant, of attempts that were granted");
    describe_histogram!(HOLD, seconds, "Time from the grant to the release or the loss of the guard");
    describe_histogram!(HANDOFF, seconds, "Time from the store's grant to a waiter until its task runs");
    describe_gauge!(LEASES_HELD, count, "Guards that exist");
    describe_gauge!(ATTEMPTS_WAITING, count, "Tasks that wait for a lock");
    describe_counter!(LOCAL_HANDOFFS, count, "Leases handed to another task of the same client");
    describe_counter!(RENEWALS, count, "Renewals that have ended, by outcome");
    describe_histogram!(RENEWAL, seconds, "Time from sending a renewal to its answer");
    describe_counter!(LEASES_LOST, count, "Leases that ended while they were held, by cause");
    describe_counter!(RECONNECTS, count, "Connections to the store that were re-established");
    describe_gauge!(COMMANDS_IN_FLIGHT, count, "Commands sent to the store and not answered");
    describe_histogram!(COMMAND, seconds, "Time from sending a command to the store's answer");
    describe_gauge!(CLOCK_OFFSET, seconds, "Store's clock minus this machine's clock");
}
