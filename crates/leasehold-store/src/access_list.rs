//! POSIX access control lists of files: who may use a file beyond what its mode says.
//!
//! Where a file has such a list, the bits of its mode that are else those of its group are the list's *mask*: the most that its group and the
//! users and groups in the list may do. A file that is made with the same mode would give its group as much. Only Linux has these lists:
//! elsewhere no file has one here.

use std::fs::File;
use std::io;
use std::path::Path;

/// The access control list of a file, if it says more than a mode can.
///
/// The bytes are those of Linux: a version, and for each entry its tag, its rights and the number of a user or a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AccessList(Vec<u8>);

const HEAD: usize = 4;
const ENTRY: usize = 8;

/// The tag of the entry of the file's group.
const GROUP: u8 = 4;
/// The tag of the mask.
const MASK: u8 = 16;

const WRITE: u8 = 2;
const READ_AND_WRITE: u8 = 6;

impl AccessList {
    /// The list of the file of this name, which is not followed if it is a link.
    ///
    /// # Errors
    ///
    /// If the file can't be looked at.
    pub fn of(path: &Path) -> io::Result<Option<Self>> {
        read(path, Kind::Access)
    }

    /// The list that files get which are made in this directory.
    ///
    /// # Errors
    ///
    /// If the directory can't be looked at.
    pub fn of_new_files_in(folder: &Path) -> io::Result<Option<Self>> {
        read(folder, Kind::Default)
    }

    /// What the file's group may do, as the last three bits.
    #[must_use]
    pub fn group_rights(&self) -> u32 {
        let rights = |tag| self.entries().find(|entry| entry[0] == tag).map(|entry| entry[2]);
        u32::from(rights(GROUP).unwrap_or(0) & rights(MASK).unwrap_or(7) & 7)
    }

    /// The list that lets those read and write who may write the file, and no others.
    #[must_use]
    pub fn of_writers(&self) -> Self {
        let mut list = self.clone();
        for entry in list.0[HEAD..].chunks_exact_mut(ENTRY) {
            entry[2] = if entry[2] & WRITE == 0 { 0 } else { READ_AND_WRITE };
        }
        list
    }

    fn entries(&self) -> impl Iterator<Item = &[u8]> {
        self.0[HEAD..].chunks_exact(ENTRY)
    }

    /// Gives the file this list, or none. The mode of the file then has to be set, since it has the mask of the list.
    ///
    /// # Errors
    ///
    /// If the system does not allow it.
    pub fn set(list: Option<&Self>, file: &File) -> io::Result<()> {
        write(list, file)
    }
}

/// Which list of a directory or a file.
#[derive(Clone, Copy)]
enum Kind {
    Access,
    Default,
}

#[cfg(target_os = "linux")]
use linux::{read, write};

#[cfg(target_os = "linux")]
mod linux {
    use rustix::fs::{XattrFlags, fremovexattr, fsetxattr, lgetxattr};
    use rustix::io::Errno;

    use super::{AccessList, ENTRY, File, HEAD, Kind, Path, io};

    const ACCESS: &str = "system.posix_acl_access";

    /// The longest value of an extended attribute.
    const LONGEST: usize = 65_536;

    pub(super) fn read(path: &Path, kind: Kind) -> io::Result<Option<AccessList>> {
        let name = match kind {
            Kind::Access => ACCESS,
            Kind::Default => "system.posix_acl_default",
        };
        let mut list = vec![0; LONGEST];
        match lgetxattr(path, name, list.as_mut_slice()) {
            Ok(length) if length >= HEAD && (length - HEAD).is_multiple_of(ENTRY) => {
                list.truncate(length);
                Ok(Some(AccessList(list)))
            }
            Ok(_) => Err(io::Error::other("the access control list is damaged")),
            // The second one: the file system has no lists.
            Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn write(list: Option<&AccessList>, file: &File) -> io::Result<()> {
        let done = match list {
            Some(AccessList(list)) => fsetxattr(file, ACCESS, list, XattrFlags::empty()),
            None => match fremovexattr(file, ACCESS) {
                Err(Errno::NODATA | Errno::OPNOTSUPP) => Ok(()),
                removed => removed,
            },
        };
        done.map_err(io::Error::from)
    }
}

#[cfg(not(target_os = "linux"))]
fn read(_path: &Path, _kind: Kind) -> io::Result<Option<AccessList>> {
    Ok(None)
}

#[cfg(not(target_os = "linux"))]
fn write(_list: Option<&AccessList>, _file: &File) -> io::Result<()> {
    Ok(())
}

/// Lists for tests.
#[cfg(all(target_os = "linux", any(test, feature = "testing")))]
pub mod testing {
    use rustix::fs::{XattrFlags, setxattr};

    use super::{File, Path};

    /// Has `setfacl -m u:USER:rw,g::GROUP,m::rw,o::- PATH` done, where `group` is three bits.
    pub fn let_in(user: u32, group: u8, path: &Path) {
        set(user, group, path, "system.posix_acl_access");
    }

    /// The same for the files that are made in a directory (`setfacl -d`).
    pub fn let_into_new_files(user: u32, group: u8, folder: &Path) {
        set(user, group, folder, "system.posix_acl_default");
    }

    fn set(user: u32, group: u8, path: &Path, name: &str) {
        const NONE: u32 = u32::MAX;
        let mut list = vec![2, 0, 0, 0];
        for (tag, rights, id) in [(1, 6, NONE), (2, 6, user), (4, group, NONE), (16, 6, NONE), (32, 0, NONE)]
        {
            list.extend([tag, 0, rights, 0]);
            list.extend(id.to_le_bytes());
        }
        setxattr(path, name, &list, XattrFlags::empty()).expect("the file system has access control lists");
        assert!(File::open(path).is_ok());
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

    use super::*;

    #[test]
    fn group_has_the_rights_of_its_entry_and_not_those_of_the_mask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        fs::write(&path, "").unwrap();
        assert_eq!(AccessList::of(&path).unwrap(), None);
        for group in [0, 4, 6] {
            testing::let_in(12_345, group, &path);
            let list = AccessList::of(&path).unwrap().unwrap();
            let mode = fs::metadata(&path).unwrap().mode();
            assert_eq!((list.group_rights(), mode & 0o777), (u32::from(group), 0o660));
            let writers = list.of_writers();
            assert_eq!(writers.group_rights(), if group == 6 { 6 } else { 0 });
        }
        // The mask limits it.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        let list = AccessList::of(&path).unwrap().unwrap();
        assert_eq!((list.group_rights(), list.of_writers().group_rights()), (4, 0));
    }

    #[test]
    fn file_gets_the_list_of_another_one_or_none() {
        let folder = tempfile::tempdir().unwrap();
        testing::let_into_new_files(12_345, 4, folder.path());
        assert!(AccessList::of_new_files_in(folder.path()).unwrap().is_some());
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        let inherited = AccessList::of(&path).unwrap();
        assert!(inherited.is_some());
        AccessList::set(None, &file).unwrap();
        assert_eq!(AccessList::of(&path).unwrap(), None);
        AccessList::set(None, &file).unwrap();
        AccessList::set(inherited.as_ref(), &file).unwrap();
        assert_eq!(AccessList::of(&path).unwrap(), inherited);
    }
}
