//! The ancestors of processes.

/// The parent of an existing process.
#[cfg(target_os = "linux")]
pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before the last parenthesis may contain anything.
    let (_, fields) = stat.rsplit_once(')')?;
    fields.split_whitespace().nth(1)?.parse().ok()
}

/// The parent of an existing process.
#[cfg(not(target_os = "linux"))]
pub(crate) fn parent_of(pid: u32) -> Option<u32> {
    let found =
        std::process::Command::new("ps").args(["-o", "ppid=", "-p", &pid.to_string()]).output().ok()?;
    String::from_utf8(found.stdout).ok()?.trim().parse().ok()
}

/// Whether a process started this one, directly or by others. A process is no ancestor of itself.
pub(crate) fn is_ancestor(pid: u32) -> bool {
    let ancestors = std::iter::successors(parent_of(std::process::id()), |pid| parent_of(*pid));
    // Bounded, because a pid may be reused during the walk, which could make it a cycle.
    ancestors.take(1_000).any(|ancestor| ancestor == pid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parent_is_an_ancestor_and_the_process_itself_is_not() {
        assert_eq!(parent_of(std::process::id()), Some(std::os::unix::process::parent_id()));
        assert!(is_ancestor(std::os::unix::process::parent_id()));
        assert!(!is_ancestor(std::process::id()));
        assert_eq!(parent_of(u32::MAX), None);
    }
}
