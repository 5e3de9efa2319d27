//! What an export by NVMe/TCP is called, and which namespace it is.

use std::net::SocketAddr;

use ashlar_target::nvme_tcp::{NAMESPACES_MAX, QUEUES_MAX, check_nqn};
use uuid::Uuid;

use crate::api::export::ExportCreate;
use crate::front::{Front, Offered, queues};
use crate::refusal::{Answer, Refusal};

pub fn front(asked: &ExportCreate, volume: Uuid, others: &[Offered]) -> Answer<Front> {
    let none = || Refusal::invalid("an address to listen at is needed");
    let listen = asked
        .listen
        .ok_or_else(|| none().fix("name one of this host, such as --listen 192.0.2.1:4420"))?;
    let own = || format!("nqn.2014-08.org.nvmexpress:uuid:{volume}");
    let nqn = asked.nqn.clone().unwrap_or_else(own);
    for name in std::iter::once(&nqn).chain(&asked.hosts) {
        if let Some(why) = check_nqn(name) {
            let fix = "a host's is in its /etc/nvme/hostnqn; a subsystem's may be left out";
            return Err(Refusal::invalid(why).fix(fix));
        }
    }
    let queues = queues(asked, QUEUES_MAX)?;
    let nsid = number(asked.nsid, &nqn, volume, listen, others)?;
    Ok(Front::NvmeTcp { listen, nqn, nsid, hosts: asked.hosts.clone(), queues })
}

/// Which namespace it is. A host that reaches a subsystem at several addresses takes what has one
/// number for one volume, and what has one uuid for one namespace.
fn number(
    asked: Option<u32>,
    nqn: &str,
    volume: Uuid,
    listen: SocketAddr,
    others: &[Offered],
) -> Answer<u32> {
    let of_subsystem = others.iter().filter_map(|(volume, front)| match front {
        Front::NvmeTcp { nqn: its, nsid, listen, .. } if its == nqn => {
            Some((*volume, *nsid, *listen))
        }
        Front::NvmeTcp { .. }
        | Front::VhostUserBlk { .. }
        | Front::Nbd { .. }
        | Front::Fuse { .. }
        | Front::Ublk { .. } => None,
    });
    let known: Vec<(Uuid, u32, SocketAddr)> = of_subsystem.collect();
    let same = known.iter().find(|(its, _, _)| *its == volume);
    if let Some((_, nsid, at)) = same {
        if *at == listen || asked.is_some_and(|asked| asked != *nsid) {
            let text = format!("the volume is namespace {nsid} of {nqn} at {at} already");
            return Err(Refusal::conflict(text).fix("choose another --nqn or another --volume"));
        }
        return Ok(*nsid);
    }
    let is_taken = |nsid: &u32| known.iter().any(|(_, its, _)| its == nsid);
    match asked {
        Some(nsid) if !(1..=NAMESPACES_MAX).contains(&nsid) => {
            let text = format!("a namespace cannot have the number {nsid}");
            Err(Refusal::invalid(text).fix(format!("use 1 to {NAMESPACES_MAX}")))
        }
        Some(nsid) if is_taken(&nsid) => {
            let text = format!("{nqn} has a namespace {nsid} already, of another volume");
            Err(Refusal::conflict(text).fix("choose another --nsid, or leave it out"))
        }
        Some(nsid) => Ok(nsid),
        None => (1..=NAMESPACES_MAX).find(|nsid| !is_taken(nsid)).ok_or_else(|| {
            let text = format!("{nqn} has {NAMESPACES_MAX} namespaces");
            Refusal::conflict(text).fix("choose another --nqn")
        }),
    }
}
