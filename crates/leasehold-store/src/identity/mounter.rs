//! Who has mounted a file system in user space.
//!
//! Such a file system (FUSE) says what it likes about the owners and modes of what is in it. With `user_allow_other` in `/etc/fuse.conf`, any user can
//! mount one that all others see. One that root has mounted is believed, as is one that is no work of a user of this system, such as virtiofs.

use std::fs::File;
use std::io;

/// The user who has mounted the file system of an opened file, if that is one in user space and the user is not root.
#[cfg(target_os = "linux")]
pub(super) fn mounter(opened: &File) -> io::Result<Option<u32>> {
    use std::os::unix::fs::MetadataExt as _;

    const FUSE: u32 = 0x6573_5546;
    #[expect(
        clippy::cast_possible_truncation,
        reason = "it has 32 bits, and a wider number repeats the sign"
    )]
    let kind = rustix::fs::fstatfs(opened)?.f_type as u32;
    if kind != FUSE {
        return Ok(None);
    }
    let device = opened.metadata()?.dev();
    let mounts = std::fs::read("/proc/self/mountinfo")?;
    let found = mounter_in(&String::from_utf8_lossy(&mounts), device);
    found.ok_or_else(|| io::Error::other("this system does not say who has mounted its file system (FUSE)"))
}

#[cfg(not(target_os = "linux"))]
pub(super) fn mounter(_opened: &File) -> io::Result<Option<u32>> {
    Ok(None)
}

/// The outer option is `None` if no line is of this device. The kernel alone writes the options at the end of a line, and escapes spaces in names,
/// which users choose.
#[cfg(target_os = "linux")]
fn mounter_in(mounts: &str, device: u64) -> Option<Option<u32>> {
    let device = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&device))?;
    let options = line.rsplit(' ').next()?;
    let user = options.split(',').find_map(|option| option.strip_prefix("user_id="));
    match user {
        None => Some(None),
        Some(user) => user.parse().ok().map(|uid: u32| Some(uid).filter(|uid| *uid != 0)),
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn user_who_has_mounted_a_file_system_is_known() {
        let mounts = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:45 / /home/alice/mnt rw,nosuid,nodev - fuse.sshfs user_id=0,\\040x rw,user_id=12345,group_id=12345,allow_other
41 22 0:46 / /mnt/pool rw - fuse.mergerfs a:b rw,user_id=0,group_id=0,default_permissions,allow_other
42 22 0:47 / /mnt/host rw - virtiofs host rw
43 22 0:48 / /odd rw - fuse x rw,user_id=many";
        let of = |minor| mounter_in(mounts, rustix::fs::makedev(0, minor));
        assert_eq!([45, 46, 47, 48, 49].map(of), [Some(Some(12_345)), Some(None), Some(None), None, None]);
        let own = File::open("/proc").unwrap();
        assert_eq!(mounter(&own).unwrap(), None);
    }
}
