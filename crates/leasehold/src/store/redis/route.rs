//! Which command goes to which node.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{join, join_all};
use leasehold_core::{Answer, ClientId, Command, Failure, Reply, Resource, Token};
use tokio::runtime::Handle;
use tokio::time::Instant;

use super::calls::{self, Call, Way};
use super::cluster::Cluster;
use super::lanes::Lanes;
use super::link::Link;
use super::script::{Ballot, Channels, Dialect};
use super::trouble::{Trouble, lost};
use super::{ANSWER_LIMIT, Nodes, durable, keys, uncovered};
use crate::store::{Answered, StoreError};
use crate::url::Host;

/// How often a command is redirected at once: from who had the slot to who has it, and once more if that has just changed.
const REDIRECTIONS: u32 = 2;

/// The pause before a slot that is on its way to another node is asked for again.
const TRY_AGAIN: Duration = Duration::from_millis(20);

impl Nodes {
    /// Runs commands in this order, and answers in this order.
    pub(super) async fn run(
        &self,
        batch: &[(Arc<Resource>, Command)],
        replicas: u32,
        floor: Option<Token>,
    ) -> Vec<Answered> {
        self.fly(batch, replicas, floor, false).await
    }

    /// Runs attempts at resources of one hash slot as one command.
    pub(super) async fn run_together(&self, batch: &[(Arc<Resource>, Command)]) -> Vec<Answered> {
        self.fly(batch, 0, None, true).await
    }

    async fn fly(
        &self,
        batch: &[(Arc<Resource>, Command)],
        replicas: u32,
        floor: Option<Token>,
        is_together: bool,
    ) -> Vec<Answered> {
        match self {
            Self::Server { link, voting } => {
                let calls: Vec<Call<'_>> = batch.iter().collect();
                let dialect = if voting.is_some() { Dialect::VOTER } else { Dialect::SERVER };
                let abstains_for = voting.and_then(|voting| voting.abstains_for);
                let ballot = Ballot { floor, abstains_for, life: "" };
                let way = Way { dialect, ballot, is_asking: false, is_together };
                let answers = run_on(link, way, replicas, &calls, None).await;
                // The sentinels, or a name that leads elsewhere by now, may know the master.
                if answers.iter().any(is_refused_by_a_replica) {
                    link.seek();
                }
                answers.into_iter().map(|answer| answer.map_err(StoreError::from)).collect()
            }
            Self::Cluster { cluster, dialect, client, runtime } => {
                let (dialect, client) = (*dialect, *client);
                Box::pin(Flight { cluster, dialect, client, runtime, batch, replicas, is_together }.run())
                    .await
            }
        }
    }

    /// Every resource that has a state, in the order of the names. `Inspect` tells which are in use.
    pub(super) async fn list(&self) -> Result<Vec<Resource>, StoreError> {
        let mut resources = Vec::new();
        match self {
            Self::Server { link, .. } => resources.extend(calls::scan(link.lanes().await?.nearest()).await?),
            Self::Cluster { cluster, runtime, .. } => {
                for host in cluster.masters() {
                    let link = cluster.link(&host, runtime)?;
                    resources.extend(calls::scan(link.lanes().await?.nearest()).await?);
                }
            }
        }
        // A scan may show a key twice.
        resources.sort_by(|a, b| (&a.name, a.kind).cmp(&(&b.name, b.kind)));
        resources.dedup();
        Ok(resources)
    }
}

fn is_refused_by_a_replica(answer: &Result<Answer, Trouble>) -> bool {
    matches!(answer, Err(Trouble::ReadOnly(_)))
}

/// All of these on one node, with what else has to be on the way there before them.
async fn run_on(
    link: &Link,
    way: Way<'_>,
    replicas: u32,
    calls: &[Call<'_>],
    inboxes: Option<ClientId>,
) -> Vec<Result<Answer, Trouble>> {
    let lanes = match link.lanes().await {
        Ok(lanes) => lanes,
        Err(error) => {
            if calls.iter().any(|(_, command)| matches!(command, Command::Renew(_))) {
                link.hurry();
            }
            return calls.iter().map(|_| Err(Trouble::Absent(error.clone()))).collect();
        }
    };
    let way = Way { ballot: Ballot { life: lanes.life(), ..way.ballot }, ..way };
    let mut answers = match inboxes {
        None => run_over(&lanes, way, replicas, calls).await,
        Some(client) => Box::pin(subscribe_and_run(&lanes, way, replicas, calls, client)).await,
    };
    if lanes.is_over() {
        // One of these may have been the answer to something else.
        for answer in &mut answers {
            *answer = Err(Trouble::Lost(lost()));
        }
    }
    if answers.iter().any(is_lost) {
        // So that whoever tries again at once does not meet the same connection.
        Box::pin(link.settled(&lanes)).await;
        // A server that votes is one of several, and its answer would come late.
        if !way.dialect.is_voting {
            Box::pin(repeat_lost(link, way, replicas, calls, &mut answers)).await;
        }
    } else if answers.iter().any(|answer| matches!(answer, Err(Trouble::Late(_)))) {
        link.doubt();
    }
    answers
}

fn is_lost(answer: &Result<Answer, Trouble>) -> bool {
    matches!(answer, Err(Trouble::Lost(_)))
}

/// Sends once more what was lost, over the connection that is there now: a connection that was cut while it was idle is no
/// reason for an error.
///
/// An attempt is left to its machine, which has to know that the lost `Acquire` may arrive late. So is `ForceRelease`, whose
/// answer names what it took away.
async fn repeat_lost(
    link: &Link,
    way: Way<'_>,
    replicas: u32,
    calls: &[Call<'_>],
    answers: &mut [Result<Answer, Trouble>],
) {
    let Some(lanes) = link.lanes_now() else { return };
    let repeats =
        |command: &Command| matches!(command, Command::Renew(_) | Command::Release(_) | Command::Inspect);
    let lost: Vec<usize> =
        (0..calls.len()).filter(|at| is_lost(&answers[*at]) && repeats(&calls[*at].1)).collect();
    if lost.is_empty() {
        return;
    }
    let again: Vec<Call<'_>> = lost.iter().map(|at| calls[*at]).collect();
    let way = Way { ballot: Ballot { life: lanes.life(), ..way.ballot }, ..way };
    let repeated = run_over(&lanes, way, replicas, &again).await;
    if lanes.is_over() {
        return;
    }
    for ((at, (_, command)), mut answer) in lost.into_iter().zip(again).zip(repeated) {
        if let (Command::Release(_), Ok(Answer { reply: reply @ Reply::NotHeld, .. })) =
            (command, &mut answer)
        {
            // The lost one may be why there is nothing left to give back.
            *reply = Reply::Released;
        }
        answers[at] = answer;
    }
}

/// By the nearest connection, unless that turns out to be gone.
async fn run_over(
    lanes: &Lanes,
    way: Way<'_>,
    replicas: u32,
    calls: &[Call<'_>],
) -> Vec<Result<Answer, Trouble>> {
    if replicas > 0 {
        return Box::pin(durable::run(lanes, way, replicas, calls)).await;
    }
    let Some(express) = lanes.express() else {
        return calls::run(lanes.home(), way, calls).await;
    };
    let answers = calls::run(express, way, calls).await;
    if answers.iter().any(|answer| matches!(answer, Err(Trouble::Lost(_) | Trouble::Late(_)))) {
        lanes.drop_express();
    }
    answers
}

/// Whoever is going to wait has to hear of it, so its slot's inbox is subscribed to first, in the same flight.
async fn subscribe_and_run(
    lanes: &Lanes,
    way: Way<'_>,
    replicas: u32,
    calls: &[Call<'_>],
    client: ClientId,
) -> Vec<Result<Answer, Trouble>> {
    let waits = |command: &Command| matches!(command, Command::Acquire(acquire) if acquire.wait.is_some());
    let mut slots: Vec<u16> = calls
        .iter()
        .filter(|(_, command)| waits(command))
        .map(|(resource, _)| keys::slot_of(resource))
        .collect();
    slots.sort_unstable();
    slots.dedup();
    // Subscribed to by the server's word: then it does not matter which way the command goes. Whoever does not have that word
    // asks for it, also if somebody else is about to: that one may be dropped before anything is sent.
    slots.retain(|slot| !lanes.is_subscribed(*slot));
    if slots.is_empty() {
        return run_over(lanes, way, replicas, calls).await;
    }
    let subscribe = slots.iter().map(|slot| subscribe(lanes, way, client, *slot));
    let (failed, mut answers) = if replicas > 0 {
        (join_all(subscribe).await, durable::run(lanes, way, replicas, calls).await)
    } else {
        join(join_all(subscribe), calls::run(lanes.home(), way, calls)).await
    };
    for (slot, trouble) in failed.into_iter().flatten() {
        for ((resource, command), answer) in calls.iter().zip(&mut answers) {
            if waits(command) && keys::slot_of(resource) == slot {
                unheard(answer, &trouble);
            }
        }
    }
    answers
}

/// Subscribes to a slot's inbox. An error says why that failed.
async fn subscribe(lanes: &Lanes, way: Way<'_>, client: ClientId, slot: u16) -> Option<(u16, Trouble)> {
    let word = if way.dialect.channels == Channels::Sharded { "SSUBSCRIBE" } else { "SUBSCRIBE" };
    let mut command = redis::cmd(word);
    command.arg(keys::inbox_of(client, Some(slot)));
    let mut home = lanes.home();
    // A channel of a slot that is being imported is only served after ASKING, as its keys are.
    let told = if way.is_asking && way.dialect.channels == Channels::Sharded {
        calls::flight(&mut home, vec![command], true).await.pop().unwrap_or(Ok(redis::Value::Nil))
    } else {
        home.send_packed_command(&command).await
    };
    match told.and_then(redis::Value::extract_error) {
        Ok(_) => {
            lanes.confirm_subscription(slot);
            None
        }
        Err(error) => Some((slot, Trouble::from(&error))),
    }
}

/// What the answer to an attempt that waits is worth when its inbox could not be subscribed to. A redirection says that the
/// slot is moving, which takes nothing from a grant; an attempt that was queued has to go where its grant can be heard of.
fn unheard(answer: &mut Result<Answer, Trouble>, trouble: &Trouble) {
    let Ok(good) = answer else { return };
    if !matches!(trouble, Trouble::Moved(_) | Trouble::Ask(_) | Trouble::TryAgain(_)) {
        let error = StoreError { failure: Failure::Unknown, ..trouble.clone().into() };
        *answer = Err(Trouble::Failed(error));
    } else if matches!(good.reply, Reply::Queued(_)) {
        *answer = Err(Trouble::Unheard(Box::new(good.clone())));
    }
}

// --- A cluster -----------------------------------------------------------------------------------

/// A batch on its way through a cluster.
struct Flight<'a> {
    cluster: &'a Cluster,
    dialect: Dialect,
    client: ClientId,
    runtime: &'a Handle,
    batch: &'a [(Arc<Resource>, Command)],
    replicas: u32,
    is_together: bool,
}

/// A command on its way.
struct Job {
    index: usize,
    slot: u16,
    /// The node that is about to get the slot, when the present one sent us there.
    asked: Option<Host>,
    /// Why it did not go the last time.
    trouble: Option<StoreError>,
    /// It was queued, where its grant can't be heard of.
    queued: Option<Answer>,
}

impl Flight<'_> {
    async fn run(&self) -> Vec<Answered> {
        let give_up = Instant::now() + ANSWER_LIMIT;
        let mut answers: Vec<Option<Answered>> = self.batch.iter().map(|_| None).collect();
        let job = |(index, (resource, _)): (usize, &(Arc<Resource>, Command))| Job {
            index,
            slot: keys::slot_of(resource),
            asked: None,
            trouble: None,
            queued: None,
        };
        let mut rounds = 0;
        let mut jobs: Vec<Job> = self.batch.iter().enumerate().map(job).collect();
        loop {
            let done =
                join_all(self.by_node(jobs).into_iter().map(|(to, jobs)| self.run_group(to, jobs))).await;
            jobs = Vec::new();
            let mut is_pausing = false;
            for (mut job, answer) in done.into_iter().flatten() {
                match answer {
                    Ok(answer) => answers[job.index] = Some(Ok(answer)),
                    Err(Trouble::Moved(to)) => {
                        self.cluster.moved(job.slot, to);
                        job.asked = None;
                        jobs.push(job);
                    }
                    Err(Trouble::Ask(to)) => {
                        job.asked = Some(to);
                        jobs.push(job);
                    }
                    Err(Trouble::Unheard(queued)) => {
                        self.cluster.doubt();
                        is_pausing = true;
                        job.asked = None;
                        job.queued = Some(*queued);
                        jobs.push(job);
                    }
                    // Nothing of it has happened.
                    Err(Trouble::TryAgain(error) | Trouble::Absent(error) | Trouble::ReadOnly(error)) => {
                        self.cluster.doubt();
                        is_pausing = true;
                        job.asked = None;
                        job.trouble = Some(error);
                        jobs.push(job);
                    }
                    Err(Trouble::Lost(error) | Trouble::Late(error) | Trouble::Failed(error)) => {
                        self.cluster.doubt();
                        answers[job.index] = Some(Err(error));
                    }
                }
            }
            // One that has to go elsewhere holds back nobody's answers: it is for whoever sent it to repeat.
            let is_held_back = !jobs.is_empty() && self.batch.len() > 1 && !self.is_together;
            if jobs.is_empty() || is_held_back || Instant::now() >= give_up {
                break;
            }
            rounds += 1;
            if is_pausing || rounds > REDIRECTIONS {
                tokio::time::sleep(TRY_AGAIN).await;
            }
        }
        for Job { index, queued, trouble, .. } in jobs {
            // Without an inbox it looks again by itself, or when the slots have changed.
            answers[index] = Some(queued.ok_or_else(|| trouble.unwrap_or_else(going_round)));
        }
        answers.into_iter().map(|answer| answer.unwrap_or_else(|| Err(going_round()))).collect()
    }

    fn by_node(&self, jobs: Vec<Job>) -> BTreeMap<(Option<Host>, bool), Vec<Job>> {
        let mut groups = BTreeMap::<_, Vec<Job>>::new();
        for job in jobs {
            let is_asking = job.asked.is_some();
            let to = job.asked.clone().or_else(|| self.cluster.master_of(job.slot));
            groups.entry((to, is_asking)).or_default().push(job);
        }
        groups
    }

    async fn run_group(
        &self,
        (to, is_asking): (Option<Host>, bool),
        jobs: Vec<Job>,
    ) -> Vec<(Job, Result<Answer, Trouble>)> {
        let link = match &to {
            None => Err(uncovered()),
            Some(host) => self.cluster.link(host, self.runtime),
        };
        let link = match link {
            Ok(link) => link,
            Err(error) => {
                return jobs.into_iter().map(|job| (job, Err(Trouble::TryAgain(error.clone())))).collect();
            }
        };
        let calls: Vec<Call<'_>> = jobs.iter().map(|job| &self.batch[job.index]).collect();
        let way = Way {
            dialect: self.dialect,
            ballot: Ballot::default(),
            is_asking,
            is_together: self.is_together,
        };
        let answers = run_on(&link, way, self.replicas, &calls, Some(self.client)).await;
        jobs.into_iter().zip(answers).collect()
    }
}

fn going_round() -> StoreError {
    StoreError {
        failure: Failure::Busy,
        message: "the cluster's nodes send each other's clients round in a circle: try again soon".to_owned(),
    }
}
