//! What an export by NVMe/TCP is called, which namespace it is, and what its hosts have to prove.

use std::net::SocketAddr;

use ashlar_target::nvme_tcp::{HOSTS_MAX, NAMESPACES_MAX, QUEUES_MAX, check_nqn};
use uuid::Uuid;

use crate::api::export::{ExportCreate, HostsChange};
use crate::front::{Front, Offered, queues};
use crate::refusal::{Answer, Refusal};
use crate::secret::KeptSecrets;

pub fn front(asked: &ExportCreate, volume: Uuid, others: &[Offered]) -> Answer<Front> {
    let none = || Refusal::invalid("an address to listen at is needed");
    let listen = asked
        .listen
        .ok_or_else(|| none().fix("name one of this host, such as --listen 192.0.2.1:4420"))?;
    let own = || format!("nqn.2014-08.org.nvmexpress:uuid:{volume}");
    let nqn = asked.nqn.clone().unwrap_or_else(own);
    let mut hosts = asked.hosts.clone();
    hosts.extend(asked.host_secrets.keys().filter(|its| !asked.hosts.contains(its)).cloned());
    std::iter::once(&nqn).chain(&hosts).try_for_each(|name| check(name))?;
    let queues = queues(asked, QUEUES_MAX)?;
    let nsid = number(asked.nsid, &nqn, volume, listen, others)?;
    let secrets = secrets(asked, &nqn, &hosts, others)?;
    Ok(Front::NvmeTcp { listen, nqn, nsid, hosts, secrets, queues })
}

fn check(name: &str) -> Answer<()> {
    let fix = "a host's is in its /etc/nvme/hostnqn; a subsystem's may be left out";
    check_nqn(name).map_or(Ok(()), |why| Err(Refusal::invalid(why).fix(fix)))
}

/// What the hosts of an export become.
pub fn hosts_changed(its: &[String], change: &HostsChange) -> Answer<Vec<String>> {
    let HostsChange { allow, forbid, .. } = change;
    allow.iter().try_for_each(|name| check(name))?;
    if let Some(host) = forbid.iter().find(|host| allow.contains(host)) {
        return Err(Refusal::invalid(format!("{host} is let in, and shut out"))
            .fix("leave out its --host, or its --no-host"));
    }
    if its.is_empty() && !forbid.is_empty() {
        return Err(Refusal::conflict("all hosts may use it, and so none can be shut out by name")
            .fix("name those that may instead, by --host: all others are shut out then"));
    }
    if let Some(host) = forbid.iter().find(|host| !its.contains(host)) {
        let text = format!("{host} cannot be shut out: it is none of the hosts that may use it");
        return Err(Refusal::invalid(text).fix("`ashlar export show` names them"));
    }
    let mut all: Vec<String> = its.iter().filter(|host| !forbid.contains(host)).cloned().collect();
    for host in allow {
        if !all.contains(host) {
            all.push(host.clone());
        }
    }
    if all.is_empty() && !forbid.is_empty() {
        let text = "no host would be left, and an export that names none is open to all";
        return Err(Refusal::conflict(text)
            .fix("let another in with the same command, by --host, or delete the export"));
    }
    if all.len() > HOSTS_MAX {
        return Err(Refusal::invalid(format!("{} hosts; {HOSTS_MAX} are possible", all.len()))
            .fix("shut some out with --no-host"));
    }
    Ok(all)
}

/// Whether a host may use an export of these.
fn is_host(hosts: &[String], host: &String) -> bool {
    hosts.is_empty() || hosts.contains(host)
}

/// All secrets of a subsystem: a host proves who it is to that, not to a namespace.
pub fn known_secrets<'a>(nqn: &str, fronts: impl Iterator<Item = &'a Front>) -> KeptSecrets {
    let mut all = KeptSecrets::default();
    for its in fronts.filter_map(|front| secrets_in(front, nqn)) {
        for (host, secret) in &its.hosts {
            all.hosts.entry(host.clone()).or_insert_with(|| secret.clone());
        }
        all.controller = all.controller.or_else(|| its.controller.clone());
    }
    all
}

/// `None`: it is of another subsystem.
fn secrets_in<'a>(front: &'a Front, nqn: &str) -> Option<&'a KeptSecrets> {
    match front {
        Front::NvmeTcp { nqn: its, secrets, .. } if its == nqn => Some(secrets),
        Front::NvmeTcp { .. }
        | Front::VhostUserBlk { .. }
        | Front::Nbd { .. }
        | Front::Fuse { .. }
        | Front::Ublk { .. } => None,
    }
}

/// Of all that are known, those of an export with these hosts. Each export has all of its hosts',
/// so that none of them depends on another one.
fn secrets_for(hosts: &[String], all: &KeptSecrets) -> KeptSecrets {
    let its = all.hosts.iter().filter(|(host, _)| is_host(hosts, host));
    KeptSecrets {
        hosts: its.map(|(host, secret)| (host.clone(), secret.clone())).collect(),
        controller: all.controller.clone(),
    }
}

/// Gives the exports of a subsystem what they have to know of these.
pub fn give_secrets<'a>(nqn: &str, all: &KeptSecrets, fronts: impl Iterator<Item = &'a mut Front>) {
    for front in fronts {
        if let Front::NvmeTcp { nqn: its, hosts, secrets, .. } = front
            && its == nqn
        {
            *secrets = secrets_for(hosts, all);
        }
    }
}

/// Those that are asked for, and those that its hosts have in the subsystem already.
fn secrets(
    asked: &ExportCreate,
    nqn: &str,
    hosts: &[String],
    others: &[Offered],
) -> Answer<KeptSecrets> {
    let mut all = KeptSecrets {
        hosts: asked.host_secrets.clone(),
        controller: asked.controller_secret.clone(),
    };
    let known = known_secrets(nqn, others.iter().map(|(_, front)| front));
    let another = |of: &str| {
        Refusal::conflict(format!("{of} has another secret in {nqn} already")).fix(
            "leave it out here; `ashlar export set` changes it for all exports of the subsystem",
        )
    };
    for (host, secret) in &known.hosts {
        if all.hosts.entry(host.clone()).or_insert_with(|| secret.clone()) != secret {
            return Err(another(host));
        }
    }
    if let Some(secret) = &known.controller
        && all.controller.get_or_insert_with(|| secret.clone()) != secret
    {
        return Err(another("the subsystem"));
    }
    if asked.controller_secret.is_some() && all.hosts.is_empty() {
        return Err(nobody_asks());
    }
    Ok(secrets_for(hosts, &all))
}

fn nobody_asks() -> Refusal {
    Refusal::invalid("only a host with a secret of its own asks the subsystem for a proof")
        .fix("name one with --host-secret NQN=FILE")
}

/// What the secrets of a subsystem become.
pub fn changed(its: &KeptSecrets, change: &HostsChange) -> Answer<KeptSecrets> {
    let mut all = its.clone();
    for (host, secret) in &change.secrets {
        match secret {
            Some(secret) => drop(all.hosts.insert(host.clone(), secret.clone())),
            None => drop(all.hosts.remove(host)),
        }
    }
    if change.remove_controller {
        all.controller = None;
    }
    all.controller = change.controller.clone().or(all.controller);
    match change.controller.is_some() && all.hosts.is_empty() {
        true => Err(nobody_asks()),
        false => Ok(all),
    }
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
