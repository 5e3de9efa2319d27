//! Who may connect to the socket of an export that is there.

use ashlar_target::unix_socket;

use crate::access::SocketAccess;
use crate::api::export::Export;
use crate::host::{Host, exports};
use crate::refusal::{Answer, Refusal};
use crate::served::beside;

impl Host {
    /// What is left out of `change` stays as it is. Who is connected stays so.
    pub async fn set_export_access(&self, name: &str, change: SocketAccess) -> Answer<Export> {
        let change = beside(move || change.in_numbers()).await??;
        let _change = self.begin().await?;
        let known = self.look(|state| state.catalog.exports.get(name).cloned());
        let front = known.ok_or_else(|| exports::unknown(name))?.front;
        let (Some(is), Some(path)) = (front.access(), front.socket()) else {
            return Err(front.no_socket());
        };
        let access = is.changed(&change);
        let waits = self.look(|state| state.waiting.contains_key(name));
        // What is at the path of one that is down is another's.
        let listens = waits || self.served(name).is_some();
        let (path, its) = (path.to_owned(), access.clone());
        let give = move || -> Answer<()> {
            let access = its.access()?;
            let given = if listens { unix_socket::give(&path, access) } else { Ok(()) };
            given.map_err(|error| {
                let text = format!("{} cannot be given to others: {error}", path.display());
                Refusal::failed(text).fix("run the daemon as root, if it does not")
            })
        };
        beside(give).await??;
        self.record(|catalog| {
            let export = catalog.exports.get_mut(name);
            if let Some(its) = export.and_then(|export| export.front.access_mut()) {
                *its = access;
            }
        })?;
        self.show_export(name).await
    }
}
