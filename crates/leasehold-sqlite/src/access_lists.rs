//! Why files and directories with POSIX access control lists are refused.

use std::io;
use std::path::Path;

use leasehold_store::access_list::AccessList;

/// Why a file with an access control list is refused; `None` if it has none.
pub(super) fn list_of(path: &Path) -> io::Result<Option<String>> {
    let shown = path.display();
    let refused = |_| {
        format!(
            "{shown} has an access control list, which the files that SQLite makes beside it do not get: they would let in the group of the \
             database. Let its users in by a group of their own, and remove the list: setfacl -b {shown}"
        )
    };
    Ok(AccessList::of(path)?.map(refused))
}

/// Why a directory is refused whose new files get an access control list; `None` if they get none.
pub(super) fn list_of_new_files_in(folder: &Path) -> io::Result<Option<String>> {
    let shown = folder.display();
    let refused = |_| {
        format!(
            "the files that are made in {shown} get an access control list (its default list), which would let others use SQLite's files than \
             the users of the database: setfacl -k {shown}"
        )
    };
    Ok(AccessList::of_new_files_in(folder)?.map(refused))
}
