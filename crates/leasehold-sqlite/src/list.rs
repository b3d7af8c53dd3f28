//! The list of all locks in use, which may take long: it has a connection of its own, on a thread of its own.

use leasehold_core::{Kind, Name, Resource};
use leasehold_store::StoreError;
use rusqlite::Connection;

use super::foreign_code::WHOLE_TIME_LIMIT;
use super::schema;
use super::shared::{Shared, TransactionError};

/// Those of which there is a lease or a waiter. The rows of locks that were used within the last hour may be many times as many, so they are
/// looked up from these.
const IN_USE: &str = "SELECT kind, name FROM resource
    WHERE id IN (SELECT resource FROM lease UNION ALL SELECT resource FROM waiter) ORDER BY name, kind";

impl Shared {
    pub(super) fn list(&self) -> Result<Vec<Resource>, StoreError> {
        let listed = self.identity.run(|| {
            let mut connection = self.connect().map_err(TransactionError::into_error)?;
            connection.limit = WHOLE_TIME_LIMIT;
            read_in_use(&connection.limited()).map_err(schema::not_done)
        });
        listed.unwrap_or_else(|error| Err(schema::not_sent(error.to_string()).caused_by(error)))
    }
}

/// What only another version knows is left out, and so is what others have written.
fn read_in_use(connection: &Connection) -> rusqlite::Result<Vec<Resource>> {
    let mut statement = connection.prepare(IN_USE)?;
    let mut rows = statement.query([])?;
    let mut resources = Vec::new();
    while let Some(row) = rows.next()? {
        let kind = row.get_ref(0)?.as_str().ok().and_then(Kind::parse);
        let name = row.get_ref(1)?.as_str().ok().and_then(|name| Name::new(name).ok());
        if let (Some(kind), Some(name)) = (kind, name) {
            resources.push(Resource { kind, name });
        }
    }
    Ok(resources)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::TABLES;

    #[test]
    fn unused_rows_are_not_read_for_a_list() {
        let connection = Connection::open_in_memory().unwrap();
        connection.execute_batch(TABLES).unwrap();
        let mut statement = connection.prepare(&format!("EXPLAIN QUERY PLAN {IN_USE}")).unwrap();
        let steps = statement.query_map([], |row| row.get::<_, String>("detail")).unwrap();
        let steps: Vec<String> = steps.map(Result::unwrap).collect();
        assert!(
            steps.iter().any(|step| step.starts_with("SEARCH resource USING INTEGER PRIMARY KEY")),
            "{steps:?}"
        );
        assert!(!steps.iter().any(|step| step.starts_with("SCAN resource")), "{steps:?}");
    }
}
