//! The live view on a terminal: a table of the locks, and one lock with its holders and its queue.
//!
//! [`View`] is a value: keys and polled locks go in, and actions come out, so it is tested without a terminal.

use std::io;
use std::time::Duration;

use leasehold::{HolderInfo, Kind, LockInfo, Token};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Modifier, Style};
use ratatui::widgets::{Block, Paragraph, Row, Table, TableState, Wrap};
use ratatui::{DefaultTerminal, Frame};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::{Instant, sleep_until};

use super::source::Source;
use crate::exit::{Exit, Stop};
use crate::inspect::{identity, lock_text};
use crate::table::{Columns, HEAD, cut, row};
use crate::text::printable;

pub(super) async fn show(source: &Source, interval: Duration) -> Result<Exit, Stop> {
    let failed = |error: io::Error| Stop::failure(format!("the terminal can't be used: {error}"));
    let mut terminal = ratatui::try_init().map_err(failed)?;
    let ended = run(&mut terminal, source, interval).await;
    ratatui::restore();
    ended.map_err(failed)
}

async fn run(terminal: &mut DefaultTerminal, source: &Source, interval: Duration) -> io::Result<Exit> {
    let mut keys = read_keys()?;
    let mut ends = signal(SignalKind::terminate())?;
    let mut view = View { url: printable(&source.url), ..View::default() };
    let mut next = Instant::now();
    loop {
        terminal.draw(|frame| view.draw(frame))?;
        let polled = async {
            sleep_until(next).await;
            source.poll().await
        };
        let action = tokio::select! {
            biased;
            _ = ends.recv() => return Ok(Exit::Signal(nix::sys::signal::Signal::SIGTERM as i32)),
            key = keys.recv() => key.map_or(Action::Quit, |key| view.handle_key(key)),
            polled = polled => {
                next = Instant::now() + interval;
                view.handle_locks(polled.map_err(|error| error.to_string()));
                Action::Nothing
            }
        };
        match action {
            Action::Nothing => {}
            Action::Quit => return Ok(Exit::Success),
            Action::Release(kind, name, token) => {
                let released = source.release(kind, &name, token).await;
                view.note = match released {
                    Ok(true) => format!("released {kind} {}, token {token}", printable(&name)),
                    Ok(false) => format!("token {token} did not hold {kind} {} any more", printable(&name)),
                    Err(error) => error.to_string(),
                };
                next = Instant::now();
            }
        }
    }
}

/// Keys, and changes of the terminal's size, which need a new picture only.
fn read_keys() -> io::Result<Receiver<KeyEvent>> {
    let (sender, keys) = channel(16);
    let redraw = KeyEvent::new(KeyCode::Null, KeyModifiers::NONE);
    let read = move || {
        while let Ok(event) = event::read() {
            let key = match event {
                Event::Key(key) if key.kind != KeyEventKind::Release => key,
                Event::Resize(..) => redraw,
                _ => continue,
            };
            if sender.blocking_send(key).is_err() {
                return;
            }
        }
    };
    std::thread::Builder::new().name("keys".to_owned()).spawn(read)?;
    Ok(keys)
}

/// What a key makes the view do.
#[derive(Debug, PartialEq, Eq)]
enum Action {
    Nothing,
    Quit,
    Release(Kind, String, Token),
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Sort {
    #[default]
    Name,
    Held,
    Waiting,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Mode {
    #[default]
    List,
    /// The filter is typed.
    Filter,
    /// One lock.
    Lock(Kind, String),
    /// Whether to release this holder.
    Confirm(Kind, String, Token),
}

#[derive(Default)]
struct View {
    url: String,
    locks: Vec<LockInfo>,
    /// Why the last poll failed.
    outage: Option<String>,
    /// The result of the last release.
    note: String,
    filter: String,
    sort: Sort,
    mode: Mode,
    selected: usize,
}

impl View {
    fn handle_locks(&mut self, polled: Result<Vec<LockInfo>, String>) {
        match polled {
            Ok(locks) => {
                // The selection stays at its lock.
                let selected = self.selected_lock().map(|lock| (lock.kind, lock.name.clone()));
                (self.locks, self.outage) = (locks, None);
                let at = selected.and_then(|selected| {
                    self.visible()
                        .iter()
                        .position(|lock| (lock.kind, &lock.name) == (selected.0, &selected.1))
                });
                self.selected = at.unwrap_or(self.selected).min(self.visible().len().saturating_sub(1));
            }
            Err(error) => self.outage = Some(error),
        }
    }

    /// The locks that pass the filter, in order.
    fn visible(&self) -> Vec<&LockInfo> {
        let has_text = |lock: &&LockInfo| row(lock).iter().any(|cell| cell.contains(&self.filter));
        let mut locks: Vec<&LockInfo> = self.locks.iter().filter(has_text).collect();
        let held_for = |lock: &LockInfo| lock.holders.iter().map(|holder| holder.held_for).max();
        match self.sort {
            Sort::Name => {}
            Sort::Held => locks.sort_by_key(|lock| std::cmp::Reverse(held_for(lock))),
            Sort::Waiting => locks.sort_by_key(|lock| std::cmp::Reverse(lock.waiters.len())),
        }
        locks
    }

    fn selected_lock(&self) -> Option<&LockInfo> {
        self.visible().get(self.selected).copied()
    }

    /// The lock that the view is about: the one that is open, or the selected one.
    fn lock(&self) -> Option<&LockInfo> {
        match &self.mode {
            Mode::Lock(kind, name) | Mode::Confirm(kind, name, _) => {
                self.locks.iter().find(|lock| (lock.kind, &lock.name) == (*kind, name))
            }
            Mode::List | Mode::Filter => self.selected_lock(),
        }
    }

    fn handle_key(&mut self, key: KeyEvent) -> Action {
        if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) {
            return Action::Quit;
        }
        match (&self.mode, key.code) {
            (Mode::Filter, code) => self.edit_filter(code),
            (Mode::Confirm(..), code) => return self.handle_answer(code),
            (_, KeyCode::Char('q')) => return Action::Quit,
            (_, KeyCode::Char('r')) => self.ask(),
            (Mode::Lock(..), KeyCode::Esc | KeyCode::Backspace | KeyCode::Left) => self.mode = Mode::List,
            (Mode::List, KeyCode::Char('/')) => self.mode = Mode::Filter,
            (Mode::List, KeyCode::Esc) => self.filter.clear(),
            (Mode::List, KeyCode::Char('s')) => {
                self.sort = match self.sort {
                    Sort::Name => Sort::Held,
                    Sort::Held => Sort::Waiting,
                    Sort::Waiting => Sort::Name,
                };
            }
            (Mode::List, KeyCode::Down | KeyCode::Char('j')) => {
                self.selected = (self.selected + 1).min(self.visible().len().saturating_sub(1));
            }
            (Mode::List, KeyCode::Up | KeyCode::Char('k')) => self.selected = self.selected.saturating_sub(1),
            (Mode::List, KeyCode::Enter | KeyCode::Right) => {
                if let Some(lock) = self.selected_lock() {
                    self.mode = Mode::Lock(lock.kind, lock.name.clone());
                }
            }
            _ => {}
        }
        Action::Nothing
    }

    fn edit_filter(&mut self, code: KeyCode) {
        match code {
            KeyCode::Char(c) => self.filter.push(c),
            KeyCode::Backspace => {
                self.filter.pop();
            }
            KeyCode::Enter => self.mode = Mode::List,
            KeyCode::Esc => {
                self.filter.clear();
                self.mode = Mode::List;
            }
            _ => {}
        }
        self.selected = 0;
    }

    /// Asks whether to release the first holder.
    fn ask(&mut self) {
        let first =
            self.lock().and_then(|lock| Some((lock.kind, lock.name.clone(), lock.holders.first()?.token)));
        if let Some((kind, name, token)) = first {
            self.mode = Mode::Confirm(kind, name, token);
        }
    }

    /// Only `y` releases.
    fn handle_answer(&mut self, code: KeyCode) -> Action {
        if code == KeyCode::Null {
            return Action::Nothing;
        }
        match std::mem::take(&mut self.mode) {
            Mode::Confirm(kind, name, token) if code == KeyCode::Char('y') => {
                Action::Release(kind, name, token)
            }
            _ => Action::Nothing,
        }
    }

    // --- The picture -----------------------------------------------------------------------------

    fn draw(&self, frame: &mut Frame<'_>) {
        let foot = self.foot(usize::from(frame.area().width));
        let foot_height = u16::try_from(foot.len()).unwrap_or(1);
        let [head, body, foot_area] =
            Layout::vertical([Constraint::Length(1), Constraint::Min(0), Constraint::Length(foot_height)])
                .areas(frame.area());
        let waiting: usize = self.locks.iter().map(|lock| lock.waiters.len()).sum();
        let locks = if self.locks.len() == 1 { "lock" } else { "locks" };
        let counts = format!("  {} {locks}, {waiting} waiting", self.locks.len());
        let url = cut(&self.url, usize::from(head.width).saturating_sub(counts.len()));
        let bold = Style::new().add_modifier(Modifier::BOLD);
        frame.render_widget(Paragraph::new(format!("{url}{counts}")).style(bold), head);
        match &self.mode {
            Mode::List | Mode::Filter => {
                let mut state = TableState::default().with_selected(Some(self.selected));
                frame.render_stateful_widget(self.table(usize::from(body.width)), body, &mut state);
            }
            Mode::Lock(kind, name) | Mode::Confirm(kind, name, _) => {
                let free = || format!("{kind} {}\nfree", printable(name));
                let text = self.lock().map_or_else(free, lock_text);
                frame
                    .render_widget(Paragraph::new(text).wrap(Wrap { trim: false }).block(Block::new()), body);
            }
        }
        let reversed = Style::new().add_modifier(Modifier::REVERSED);
        frame.render_widget(Paragraph::new(foot.join("\n")).style(reversed), foot_area);
    }

    fn table(&self, width: usize) -> Table<'static> {
        let rows: Vec<_> = self.visible().into_iter().map(row).collect();
        let columns = Columns::new(&rows, Some(width));
        let widths =
            columns.widths().map(|width| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX)));
        let head = Row::new(columns.cells(&HEAD)).style(Style::new().add_modifier(Modifier::BOLD));
        Table::new(rows.iter().map(|row| Row::new(columns.cells(row))), widths)
            .column_spacing(2)
            .header(head)
            .row_highlight_style(Style::new().add_modifier(Modifier::REVERSED))
    }

    /// The lines at the bottom, each of which fits. What the user must see to answer comes first.
    fn foot(&self, width: usize) -> Vec<String> {
        let lines = match &self.mode {
            Mode::Confirm(kind, name, token) => self.question(*kind, name, *token),
            _ if self.outage.is_some() => self.outage.iter().cloned().collect(),
            Mode::Filter => vec![format!("filter: {}_   Enter keeps it, Esc clears it", self.filter)],
            _ if !self.note.is_empty() => vec![self.note.clone()],
            Mode::Lock(..) => vec!["Esc back   r release by force   q quit".to_owned()],
            Mode::List => vec![self.keys()],
        };
        lines.iter().map(|line| cut(&printable(line), width)).collect()
    }

    fn question(&self, kind: Kind, name: &str, token: Token) -> Vec<String> {
        let who = |holder: &HolderInfo| identity(&holder.metadata, &holder.client);
        let holder = self.lock().and_then(|lock| lock.holders.iter().find(|holder| holder.token == token));
        let who = holder.map_or_else(|| "a former holder".to_owned(), who);
        vec![
            format!("release {kind} {name}?"),
            format!("held by {who}, token {token}"),
            "y: release, other keys: no. It may still be working".to_owned(),
        ]
    }

    fn keys(&self) -> String {
        let sort = match self.sort {
            Sort::Name => "name",
            Sort::Held => "held for",
            Sort::Waiting => "waiting",
        };
        let filter = if self.filter.is_empty() { String::new() } else { format!(" ({})", self.filter) };
        format!("q quit  Enter open  r release  s sort: {sort}  / filter{filter}")
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;

    /// Locks of a store in memory: `b` has a waiter, and `a` has none.
    fn locks() -> Vec<LockInfo> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = leasehold::Client::connect("memory:").await.unwrap();
            let (a, b) = (client.mutex("a").label("first"), client.mutex("b").global_fifo().label("second"));
            let held = (a.lock().await.unwrap(), b.lock().await.unwrap());
            let waiting = tokio::spawn(async move { b.lock().await.map(drop) });
            let locks = loop {
                tokio::task::yield_now().await;
                let locks = client.list().await.unwrap();
                if locks.iter().any(|lock| !lock.waiters.is_empty()) {
                    break locks;
                }
            };
            drop(held);
            waiting.await.unwrap().unwrap();
            locks
        })
    }

    fn view() -> View {
        let mut view = View { url: "memory:".to_owned(), ..View::default() };
        view.handle_locks(Ok(locks()));
        view
    }

    fn press(view: &mut View, keys: &str) -> Action {
        let mut action = Action::Nothing;
        for key in keys.chars() {
            let code = match key {
                '\n' => KeyCode::Enter,
                '\x1b' => KeyCode::Esc,
                c => KeyCode::Char(c),
            };
            action = view.handle_key(KeyEvent::new(code, KeyModifiers::NONE));
        }
        action
    }

    fn picture(view: &View) -> String {
        picture_of_width(view, 120)
    }

    fn picture_of_width(view: &View, width: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, 12)).unwrap();
        terminal.draw(|frame| view.draw(frame)).unwrap();
        terminal.backend().to_string()
    }

    #[test]
    fn locks_are_listed_filtered_and_sorted() {
        let mut view = view();
        let shown = picture(&view);
        assert!(shown.contains("memory:  2 locks, 1 waiting") && shown.contains("(first)"), "{shown}");
        let names = |view: &View| view.visible().iter().map(|lock| lock.name.clone()).collect::<Vec<_>>();
        assert_eq!(names(&view), ["a", "b"]);
        press(&mut view, "ss");
        assert_eq!(names(&view), ["b", "a"], "by waiters");
        press(&mut view, "/first\n");
        assert_eq!(names(&view), ["a"]);
        assert!(picture(&view).contains("/ filter (first)"), "{}", picture(&view));
        press(&mut view, "\x1b");
        assert_eq!(names(&view), ["b", "a"]);
    }

    #[test]
    fn narrow_terminal_shows_names_and_the_answers_to_the_question() {
        let mut view = view();
        for lock in &mut view.locks {
            lock.name = format!("{}-nightly-report-of-the-warehouse", lock.name);
            lock.holders[0].metadata.label = Some("a long command line ".repeat(5));
        }
        for width in [40, 60, 80] {
            let shown = picture_of_width(&view, width);
            assert!(shown.contains("a-nightly-repo") && shown.contains("b-nightly-repo"), "{width}: {shown}");
            assert!(shown.contains("q quit") && shown.contains("2 locks, 1 waiting"), "{width}: {shown}");
            press(&mut view, "r");
            let shown = picture_of_width(&view, width);
            assert!(shown.contains("release mutex a-nightly-repo"), "{width}: {shown}");
            assert!(shown.contains("y: release, other keys: no"), "{width}: {shown}");
            press(&mut view, "n");
        }
    }

    #[test]
    fn open_lock_shows_its_queue_and_only_y_releases_its_holder() {
        let mut view = view();
        press(&mut view, "j\n");
        let shown = picture(&view);
        assert!(shown.contains("mutex b") && shown.contains("1. ") && shown.contains("waits"), "{shown}");
        assert_eq!(press(&mut view, "r"), Action::Nothing);
        assert!(picture(&view).contains("It may still be working"));
        assert_eq!(press(&mut view, "q"), Action::Nothing, "any other key means no");
        let token = view.locks[1].holders[0].token;
        assert_eq!(press(&mut view, "jry"), Action::Release(Kind::Mutex, "b".to_owned(), token));
        assert_eq!(press(&mut view, "q"), Action::Quit);
    }

    #[test]
    fn selection_stays_at_its_lock_and_an_outage_is_shown() {
        let mut view = view();
        press(&mut view, "j");
        let locks = std::mem::take(&mut view.locks);
        view.locks.clone_from(&locks);
        view.handle_locks(Ok(locks[1..].to_vec()));
        assert!(picture(&view).contains("  1 lock, "));
        assert_eq!((view.selected, view.lock().map(|lock| lock.name.as_str())), (0, Some("b")));
        view.handle_locks(Err("connection refused".to_owned()));
        assert!(picture(&view).contains("connection refused") && picture(&view).contains("(second)"));
    }
}
