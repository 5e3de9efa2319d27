//! Goal: a host with a secret gets its volume, and nobody else; what a daemon knows of secrets it
//! keeps over restarts, and tells nobody.
//! Method: one daemon offers a volume, another has it as a drive; everything that both say is
//! searched for the secrets.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;

use daemon::Daemon;

const SUBSYSTEM: &str = "nqn.2026-01.example:disk";
const OTHER: &str = "nqn.2026-01.example:other";

/// A target with a volume, and a host that is to have it.
struct Both {
    target: Daemon,
    host: Daemon,
    /// Where the target listens.
    at: String,
    /// Who the host is.
    nqn: String,
    /// All that were made.
    secrets: Vec<String>,
}

impl Both {
    fn start() -> Both {
        let (target, host) = (Daemon::start(), Daemon::start());
        for drive in ["d0", "d1"] {
            target.ok(&format!("drive attach @/{drive}.img --size 256M"));
        }
        target.create_array("a", 1, 2);
        // Large enough for a drive.
        target.ok("volume create v --array a --size 72M");
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let at = format!("--listen {port} --nqn {SUBSYSTEM} --kind nvme-tcp");
        target.ok(&format!("export create e --volume v {at} --host {OTHER}"));
        let address = format!("nvme-tcp://{port}/{SUBSYSTEM}");
        let refusal = host.refused(&format!("drive attach {address}"));
        let nqn = refusal.split_whitespace().find(|word| word.starts_with("nqn.2014")).unwrap();
        let nqn = nqn.trim_end_matches(';').to_owned();
        target.ok("export delete e");
        Both { target, host, at, nqn, secrets: Vec::new() }
    }

    /// A new secret, in a file of this name on both.
    fn secret(&mut self, name: &str) {
        let secret = self.target.ok("gen-secret");
        for daemon in [&self.target, &self.host] {
            let path = daemon.path(name);
            std::fs::write(&path, &secret).unwrap();
            std::fs::set_permissions(path, PermissionsExt::from_mode(0o600)).unwrap();
        }
        self.secrets.push(secret.trim().to_owned());
    }

    fn create(&self, name: &str, more: &str) -> String {
        format!("export create {name} --volume v {} {more}", self.at)
    }

    fn attach(&self, more: &str) -> String {
        let port = self.at.split_whitespace().nth(1).unwrap();
        format!("drive attach nvme-tcp://{port}/{SUBSYSTEM} --name far {more}")
    }

    fn nothing_is_told(&self) {
        for (daemon, shown) in [(&self.target, "export show e"), (&self.host, "drive show far")] {
            let mut said = daemon.log() + &daemon.ok(shown);
            for line in [shown, "export list", "drive list", "status"] {
                said += &daemon.json(line).to_string();
            }
            for secret in &self.secrets {
                let body = secret.split(':').nth(2).unwrap();
                assert!(!said.contains(body), "{shown}");
            }
            let catalog = std::fs::metadata(daemon.path("state/catalog.json")).unwrap();
            assert_eq!(catalog.permissions().mode() & 0o777, 0o600);
        }
    }
}

#[test]
fn a_host_proves_who_it_is_and_does_so_again_after_a_restart() {
    let mut both = Both::start();
    ["good", "own", "bad", "new"].into_iter().for_each(|name| both.secret(name));
    let Both { target, host, nqn, .. } = &both;
    target.ok(&both.create("e", &format!("--host-secret {nqn}=@/good --controller-secret @/own")));
    let shown = &target.json("export show e")["nvme"];
    assert_eq!(shown["hosts"][0], **nqn);
    assert_eq!(shown["hosts_with_secret"][0], **nqn);
    assert_eq!(shown["controller_secret"], true);
    let connect = shown["connect"].as_str().unwrap();
    assert!(connect.contains("--dhchap-secret") && connect.contains("--dhchap-ctrl-secret"));
    assert!(target.ok("export show e").contains(&format!("secrets   of {nqn}, of the subsystem")));

    let without = host.refused(&both.attach(""));
    assert!(without.contains("was given no secret") && without.contains("--secret FILE"));
    let wrong = host.refused(&both.attach("--secret @/bad"));
    assert!(wrong.contains("authentication failed") && wrong.contains(nqn), "{wrong}");
    let log = target.log();
    assert!(log.contains(&format!("\"{nqn}\"")), "{log}");
    let wrong = host.refused(&both.attach("--secret @/good --controller-secret @/bad"));
    assert!(wrong.contains("does not prove who it is"), "{wrong}");
    host.ok(&both.attach("--secret @/good --controller-secret @/own"));
    let shown = host.json("drive show far");
    assert_eq!(shown["path"]["has_controller_secret"], true);
    assert!(host.ok("drive show far").contains("proofs    of this host and of the target"));
    both.nothing_is_told();

    // Both know it again.
    both.target.stop();
    both.target.start_again();
    both.host.stop();
    both.host.start_again();
    let Both { target, host, nqn, .. } = &both;
    host.wait_for("drive show far", |drive| drive["state"] == "free");
    host.ok("drive detach far");

    target.ok(&format!("export set e --host-secret {nqn}=@/new --no-controller-secret"));
    host.refused(&both.attach("--secret @/good"));
    host.ok(&both.attach("--secret @/new"));
    both.nothing_is_told();
    host.ok("drive detach far");
    target.ok(&format!("export set e --no-host-secret {nqn}"));
    host.ok(&both.attach(""));
    assert!(target.ok("export show e").contains("secrets   -"));
}

#[test]
fn hosts_are_let_in_and_shut_out_while_the_export_is_there() {
    let mut both = Both::start();
    both.secret("good");
    let Both { target, host, nqn, .. } = &both;
    target.ok(&both.create("e", &format!("--host {OTHER}")));
    host.refused(&both.attach(""));
    let said = target.ok(&format!("export set e --host {nqn} --host-secret {nqn}=@/good"));
    assert!(said.contains(&format!("hosts     {OTHER} {nqn}")), "{said}");
    assert!(said.contains(&format!("secrets   of {nqn}")), "{said}");
    host.refused(&both.attach(""));
    host.ok(&both.attach("--secret @/good"));
    target.ok(&format!("export set e --no-host {OTHER}"));
    host.ok("array create b --level 0 --drives far");
    host.ok("array stop b");
    assert_eq!(host.json("drive show far")["state"], "free");
    target.ok(&format!("export set e --host {OTHER} --no-host {nqn}"));
    both.nothing_is_told();
    host.ok("drive detach far --force");
    let refused = host.refused(&both.attach("--secret @/good"));
    assert!(refused.contains(&format!("let host {nqn}")), "{refused}");
    both.target.stop();
    both.target.start_again();
    let shown = both.target.json("export show e");
    assert_eq!(shown["nvme"]["hosts"], serde_json::json!([OTHER]));
    assert_eq!(shown["nvme"]["hosts_with_secret"], serde_json::json!([]));
}

#[test]
fn what_makes_no_sense_is_refused_with_the_fix() {
    let mut both = Both::start();
    ["good", "own", "new"].into_iter().for_each(|name| both.secret(name));
    let Both { target, host, nqn, .. } = &both;
    target.ok(&both.create("e", &format!("--host-secret {nqn}=@/good --host {OTHER}")));
    target.ok("volume create w --array a --size 8M");
    let second = both.create("f", "").replace("--volume v", "--volume w");
    for (line, what) in [
        (format!("{second} --host-secret {nqn}=@/new"), "`ashlar export set` changes it"),
        (format!("{second} --host-secret {OTHER}=@/missing"), "gen-secret"),
        (format!("{second} --host-secret {OTHER}=@/d0.img"), "gen-secret"),
        (format!("{second} --host-secret x=@/new"), "nqn.YYYY-MM"),
        (
            format!("{second} --controller-secret @/own").replace(SUBSYSTEM, OTHER),
            "--host-secret NQN=FILE",
        ),
        (
            format!("export set e --host-secret {nqn}=@/new --host-secret {nqn}=@/good"),
            "one --host-secret",
        ),
        (
            format!("export set e --host-secret {nqn}=@/new --no-host-secret {nqn}"),
            "leave out its --host-secret",
        ),
        (format!("export set e --host-secret {SUBSYSTEM}=@/new"), "same command: --host"),
        (format!("export set e --no-host {SUBSYSTEM}"), "none of the hosts"),
        (format!("export set e --no-host {nqn} --no-host {OTHER}"), "open to all"),
        (format!("export set e --host {nqn} --no-host {nqn}"), "let in, and shut out"),
        (format!("export set e --no-host {nqn} --host-secret {nqn}=@/new"), "none of the hosts"),
        ("export set e --host x".into(), "nqn.YYYY-MM"),
        ("export create g --volume w --controller-secret @/own".into(), "--kind nvme-tcp"),
        (format!("export create g --volume w --host-secret {nqn}=@/own"), "--kind nvme-tcp"),
    ] {
        let said = target.refused(&line);
        assert!(said.contains(what), "{line}: {said}");
    }
    target.misused(&format!("{second} --host-secret {nqn}"));
    host.misused(&both.attach("--controller-secret @/own"));
    host.make_drive("local");
    let local = host.refused("drive attach @/local.img --secret @/good");
    assert!(local.contains("leave --secret"), "{local}");
    // A second export of the subsystem knows its hosts, and what is set for one is set for both.
    target.ok(&format!("{second} --host {nqn}"));
    assert_eq!(target.json("export show f")["nvme"]["hosts_with_secret"][0], **nqn);
    target.ok(&format!("export set f --host-secret {nqn}=@/new"));
    target.ok("export delete f");
    host.ok(&both.attach("--secret @/new"));
    // A file that others can read is remarked on.
    std::fs::set_permissions(target.path("own"), PermissionsExt::from_mode(0o644)).unwrap();
    let said = target.run("export set e --controller-secret @/own");
    assert!(String::from_utf8_lossy(&said.stderr).contains("chmod 600"), "{said:?}");
}

#[test]
fn a_secret_outlives_the_export_that_it_was_given_to() {
    let mut both = Both::start();
    ["good", "own", "new"].into_iter().for_each(|name| both.secret(name));
    let Both { target, host, nqn, .. } = &both;
    let with_secret = |name: &str| {
        let shown = target.json(&format!("export show {name}"));
        shown["nvme"]["hosts_with_secret"].as_array().unwrap().len()
    };
    for volume in ["w", "x", "y"] {
        target.ok(&format!("volume create {volume} --array a --size 8M"));
    }
    let create = |name: &str, volume: &str, more: &str| {
        target.ok(&both.create(name, more).replace("--volume v", &format!("--volume {volume}")));
    };
    // Older, and without a secret.
    create("e", "v", &format!("--host {nqn}"));
    create("f", "w", &format!("--host {nqn}"));
    target.ok(&format!("export set f --host-secret {nqn}=@/good --controller-secret @/own"));
    // One for another host, and one for all: neither is in the way of a change.
    create("g", "x", &format!("--host {OTHER}"));
    create("h", "y", "");
    target.ok("export set f --controller-secret @/new");
    assert_eq!(["e", "f", "g", "h"].map(with_secret), [1, 1, 0, 1]);
    target.ok("export delete f");
    assert!(host.refused(&both.attach("")).contains("was given no secret"));
    host.ok(&both.attach("--secret @/good --controller-secret @/new"));
    host.ok("drive detach far");
    target.ok(&format!("export set e --no-host-secret {nqn}"));
    assert_eq!(["e", "g", "h"].map(with_secret), [0, 0, 0]);
    host.ok(&both.attach(""));
    host.ok("drive detach far");
    // By a new one, elsewhere.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    target.ok(&format!(
        "export create i --volume w --listen {port} --nqn {SUBSYSTEM} --kind nvme-tcp \
         --host-secret {nqn}=@/good"
    ));
    assert_eq!(["e", "g", "h"].map(with_secret), [1, 0, 1]);
    target.ok("export delete i");
    host.refused(&both.attach(""));
    both.target.stop();
    // As a daemon would have left it that gave it to some exports only.
    let path = both.target.path("state/catalog.json");
    let mut catalog: serde_json::Value =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let front = catalog["exports"]["e"]["front"]["nvme-tcp"].as_object_mut().unwrap();
    assert!(front.remove("secrets").is_some());
    std::fs::write(&path, catalog.to_string()).unwrap();
    both.target.start_again();
    let Both { target, host, nqn, .. } = &both;
    assert_eq!(target.json("export show e")["nvme"]["hosts_with_secret"][0], **nqn);
    assert!(host.refused(&both.attach("")).contains("was given no secret"));
    host.ok(&both.attach("--secret @/good"));
}

#[test]
fn secrets_that_are_made_are_of_the_usual_form() {
    let daemon = Daemon::start();
    for (words, begins, bytes) in [
        ("gen-secret", "DHHC-1:01:", 59),
        ("gen-secret --hash none", "DHHC-1:00:", 59),
        ("gen-secret --hash sha384", "DHHC-1:02:", 83),
        ("gen-secret --hash sha512", "DHHC-1:03:", 103),
    ] {
        let (one, other) = (daemon.ok(words), daemon.ok(words));
        assert!(one.starts_with(begins) && one.ends_with(":\n"), "{words}");
        assert_eq!(one.trim().len(), bytes, "{words}");
        assert_ne!(one, other);
    }
}
