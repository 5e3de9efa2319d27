//! Goal: who knows the secrets gets in, whatever both agree on, and nobody else does.
//! Method: keys, groups and responses against what Python's hashlib, hmac and pow() make of them
//! (the moduli also against OpenSSL's); conversations of both sides, with messages that are wrong,
//! late, cut short or old.

use super::message::{Kind, kind_of};
use super::response::{Role, Shared};
use super::*;

const HOST: &str = "nqn.2026-01.example:host-a";
const SUBSYSTEM: &str = "nqn.2026-01.example:disk";

fn names() -> Names {
    Names { host: HOST.into(), subsystem: SUBSYSTEM.into() }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Bytes 0, 1, 2, … and their CRC-32.
const SECRETS: [(&str, &str); 4] = [
    (
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    ),
    (
        "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:",
        "8c4e0f434e515fa2b84d634b1af7d8ae367f2af31006e1c779257da97a4d8f54",
    ),
    (
        "DHHC-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:",
        "ac150c3abe5e6149622d7a8377ca5349447ec98fe2706a3d4e1df734b5cd010c\
         cabe0839a4b1017d5f091ebe2113b519",
    ),
    (
        "DHHC-1:03:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4v\
         MDEyMzQ1Njc4OTo7PD0+P4zODhA=:",
        "b31608db55dd99b926d75e9fa56aafc264047d12590532f33cfd8a6abd635763\
         4b09936468227d3ca39d6b30b2b2c2360054aae2a1528c19b228c24e25827d08",
    ),
];

fn secret(index: usize) -> Secret {
    SECRETS[index].0.parse().expect("a secret")
}

#[test]
fn secrets_are_read_and_written_and_make_keys() {
    for (text, key) in SECRETS {
        let secret: Secret = text.parse().expect("a secret");
        assert_eq!(hex(&secret.key_of(HOST)), key);
        assert_eq!(*secret.to_text(), text);
        assert_eq!(format!("{secret:?}"), "Secret(…)");
    }
    assert_ne!(secret(0), secret(1));
    for by in [None, Some(Hash::Sha256), Some(Hash::Sha384), Some(Hash::Sha512)] {
        let made = Secret::generate(by).expect("random numbers");
        assert_eq!(made.to_text().parse(), Ok(made.clone()));
        assert_ne!(made, Secret::generate(by).expect("random numbers"));
    }
}

#[test]
fn what_is_no_secret_is_refused_with_the_reason() {
    let good = SECRETS[1].0;
    let wrong = |from: &str, to: &str| good.replacen(from, to, 1).parse::<Secret>();
    assert_eq!(wrong("DHHC-1", "DHHC-2"), Err(BadSecret::Scheme));
    assert_eq!(wrong(":01:", ":04:"), Err(BadSecret::Scheme));
    assert_eq!("DHHC-1:".parse::<Secret>(), Err(BadSecret::Scheme));
    assert_eq!(wrong("fiaR:", "fiaR"), Err(BadSecret::Encoding));
    assert_eq!(wrong("AAEC", "AA!C"), Err(BadSecret::Encoding));
    assert_eq!(wrong("AAEC", "AAED"), Err(BadSecret::Checksum));
    assert_eq!(wrong("AAEC", ""), Err(BadSecret::Length));
    assert_eq!("DHHC-1:00::".parse::<Secret>(), Err(BadSecret::Length));
}

/// Of each group SHA-256 of its modulus, of 2^x and of 2^xy; x is all 11h, and y all 22h.
const POWERS: [(Group, &str, &str, &str); 5] = [
    (
        Group::Ffdhe2048,
        "9cd3b7f336872f46c09428d1bbc19877a4d440512cda8d1c1cf0cd6e33698966",
        "e9e21a424097073148c9248310b99206574755a4778e801b7b82feb1e7d51269",
        "cd1e876da2686813dd5ed662229427fcc05862469b0c73532f79872ba486bd74",
    ),
    (
        Group::Ffdhe3072,
        "0eaf67db3a839156d5013494a5318a772b5697d270d721f37f092efc69ea5a17",
        "5af599453305d04968ca0d1465f7fb3649c51064ee7bac4b4cfd456d8eb7e7af",
        "62352311f4ed24762f9e2c632e1f1360c3aaccce307767bfcda18aa90e913295",
    ),
    (
        Group::Ffdhe4096,
        "4648414224ac881b3d0dc59b466f96d06a558278776807797ecf1f66ff397b3e",
        "1a76c6504eaf22a6d8c3188beb29905125e317d3c0e1516f4b5c4cf6fd35b496",
        "944d03957fd03b89acbe80029921d93dc34262b88e63cc28d890148d7449f1dc",
    ),
    (
        Group::Ffdhe6144,
        "227ac9066b3ddd9e193670cda2388fa884f65ba0cf98b742d1fe77a6687c79c7",
        "e9963634c373dcd7f28e7a7aa3bfcf5ce22ad3e2350caef61fc75d56e6e7cd22",
        "7c01555bdcc7afa45446e1b55136ec3ed4ef038a7fddb9ed917577be7be4a1f1",
    ),
    (
        Group::Ffdhe8192,
        "770b14efaf6f049929c523113b3fa99a8d11dab1b18af3609590122075d19833",
        "c2097061e743e45829349b6e7a03ef58563cc14ca47caf24b04d94aecbe97a89",
        "0176d8855fd945abcf4fadcd52838758a3060f95b707b63393c6b3d9ab5fead0",
    ),
];

fn exponent(group: Group, byte: u8) -> group::Exponent {
    group::Exponent::new(group, Zeroizing::new([byte; EXPONENT_BYTES]))
}

#[test]
fn groups_are_those_of_the_rfc() {
    let sha256 = |bytes: &[u8]| hex(&Hash::Sha256.of(bytes));
    for (group, modulus, public, shared) in POWERS {
        assert_eq!(sha256(&group.modulus_bytes()), modulus, "{group:?}");
        let (x, y) = (exponent(group, 0x11), exponent(group, 0x22));
        assert_eq!(sha256(&x.public()), public, "{group:?}");
        let both = [x.agree(&y.public()), y.agree(&x.public())];
        for found in both {
            let found = found.expect("of the group").expect("a group");
            assert_eq!(sha256(&found), shared, "{group:?}");
        }
    }
}

#[test]
fn what_is_not_of_the_group_is_refused() {
    for group in Group::ALL {
        let mine = exponent(group, 0x11);
        let modulus = group.modulus_bytes();
        let number = |last: u8| {
            let mut bytes = vec![0; group.bytes()];
            bytes.last_mut().into_iter().for_each(|byte| *byte = last);
            bytes
        };
        let mut before = modulus.clone();
        before.last_mut().into_iter().for_each(|byte| *byte -= 1);
        let long = [number(5), vec![0]].concat();
        let mut wrong = vec![vec![5], vec![0xff; group.bytes() + 8], long];
        if group != Group::Null {
            wrong.extend([vec![], number(0), number(1), before, modulus, number(5)[1..].to_vec()]);
            assert!(mine.agree(&number(5)).is_ok());
        }
        for theirs in wrong {
            assert!(mine.agree(&theirs).is_err(), "{group:?} {}", hex(&theirs));
        }
    }
    assert_eq!(exponent(Group::Null, 1).agree(&[]), Ok(None));
}

#[test]
fn responses_are_as_another_program_works_them_out() {
    let session = exponent(Group::Ffdhe2048, 0x11);
    let session = session.agree(&exponent(Group::Ffdhe2048, 0x22).public()).unwrap().unwrap();
    let expected = [
        (
            "b5364a7e603dda0578dda86eb4021097a86b9e6cb87f68b6428a79e4cdbedb9b",
            "4eccc6df00c37148e83f308f1ca1d8bfba5c3ad4830ad9bd5c4513985aa6caf9",
        ),
        (
            "fb8bdb37cb4102508070a3f778e676b879839177e164131596aaaff9c8b4dae2\
             376b3c98fbb46e01dc5653492360d97b",
            "e64ace2c9057661acbac6187cfaac104c28f82b8f58d93b93951f26ed108af84\
             edf8df316512ce54c4358c8bf502a19b",
        ),
        (
            "5dc088ee8eba331e55815f68c106542192d1fc5535f24d9ebc26f1c7103610d2\
             4ef39c083482de9ae93d56cf28d5eef294fb37b498b0c11d86936dee8f599011",
            "0f8a303be7eb7b8206ab06beecb7d3483377249bf009dea4f6acdd20f1ec1e7b\
             6cdbc46de630f2b3565afc9ea6c0b807c2983b4f0fe73b87e5bf87f97e3ec09d",
        ),
    ];
    for (hash, (host, controller)) in Hash::ALL.into_iter().zip(expected) {
        let secret = secret(hash as usize);
        let names = names();
        let plain = Shared { hash, session: None, transaction: 0x0506, names: &names };
        let challenge = vec![0x5a; hash.bytes()];
        let response = plain.response(Role::Host, &secret, (&challenge, 0x0102_0304));
        assert_eq!(hex(&response), host);
        let augmented = Shared { session: Some(&session), transaction: 9, ..plain };
        let challenge = vec![0xa5; hash.bytes()];
        let response = augmented.response(Role::Controller, &secret, (&challenge, 7));
        assert_eq!(hex(&response), controller);
    }
}

/// Both sides, before the first word.
struct Pair {
    host: Host,
    controller: Controller,
}

impl Pair {
    fn new(of_controller: Option<Secret>, own: Option<Secret>, offer: Offer) -> Pair {
        let host = Host::new(names(), secret(1), of_controller, offer).unwrap();
        Pair { host, controller: Controller::new(names(), secret(1), own).unwrap() }
    }

    /// With the cheapest that there is.
    fn quick(mutual: bool) -> Pair {
        let own = mutual.then(|| secret(2));
        Pair::new(own.clone(), own, Offer { groups: vec![Group::Null], ..Offer::default() })
    }

    /// To the end, as both should; what went over the wire.
    fn talk(&mut self) -> (Vec<Vec<u8>>, Result<(), Unproven>) {
        let mut sent = vec![self.host.negotiate()];
        self.controller.take(&sent[0]);
        sent.push(self.controller.give());
        let end = loop {
            let last = sent.last().expect("something was sent");
            let next = match kind_of(last).map(|its| its.0) {
                Some(Kind::Challenge) => self.host.reply(last).map(Some),
                _ => self.host.conclude(last),
            };
            match next {
                Ok(None) => break Ok(()),
                Ok(Some(message)) => {
                    self.controller.take(&message);
                    let is_last = kind_of(&message).map(|its| its.0) == Some(Kind::Success2);
                    sent.push(message);
                    if is_last {
                        break Ok(());
                    }
                    // As a transport may give it: padded.
                    let given = [self.controller.give(), vec![0; 99]].concat();
                    sent.push(given);
                }
                Err(why @ Unproven::Controller(reason)) => {
                    self.controller.take(&self.host.failure(reason));
                    break Err(why);
                }
                Err(why @ Unproven::Host(_)) => break Err(why),
            }
        };
        (sent, end)
    }
}

#[test]
fn both_agree_whatever_they_know() {
    for hash in Hash::ALL {
        for group in Group::ALL {
            for mutual in [false, true] {
                let own = mutual.then(|| secret(3));
                let offer = Offer { hashes: vec![hash], groups: vec![group] };
                let mut pair = Pair::new(own.clone(), own, offer);
                assert_eq!(pair.controller.verdict(), None);
                let (sent, end) = pair.talk();
                assert_eq!(end, Ok(()), "{hash:?} {group:?} {mutual}");
                assert_eq!(pair.controller.verdict(), Some(Ok(())));
                assert_eq!(sent.len(), if mutual { 5 } else { 4 });
                let [_, challenge, ..] = &sent[..] else { unreachable!() };
                assert_eq!((challenge[8], challenge[9]), (hash as u8, group as u8));
                assert!(sent.iter().all(|message| message.len() <= MESSAGE_BYTES_MAX));
            }
        }
    }
    // Of all, the strongest hash, and the smallest group of its strength.
    let (sent, end) = Pair::new(None, None, Offer::default()).talk();
    assert_eq!((end, sent[1][8], sent[1][9]), (Ok(()), 3, 2));
}

#[test]
fn who_does_not_know_a_secret_is_not_believed() {
    let null = || Offer { groups: vec![Group::Null], ..Offer::default() };
    for group in [Group::Null, Group::Ffdhe2048] {
        let offer = Offer { groups: vec![group], ..Offer::default() };
        let mut pair = Pair::new(None, None, offer);
        pair.host = Host::new(names(), secret(2), None, pair.host.offer).unwrap();
        let (_, end) = pair.talk();
        assert_eq!(end, Err(Unproven::Host(Failure::Failed)));
        assert_eq!(pair.controller.verdict(), Some(Err(Failure::Failed)));
    }
    // A controller with another secret than the host expects, or that says nothing of its own.
    let mut pair = Pair::new(Some(secret(0)), Some(secret(1)), null());
    assert_eq!(pair.talk().1, Err(Unproven::Controller(Failure::Failed)));
    assert_eq!(pair.controller.verdict(), Some(Err(Failure::Failed)), "it is told");
    let mut pair = Pair::new(Some(secret(0)), None, null());
    assert_eq!(pair.talk().1, Err(Unproven::Host(Failure::Failed)));
    let mut pair = Pair::quick(true);
    let challenge = {
        pair.controller.take(&pair.host.negotiate());
        pair.controller.give()
    };
    pair.host.reply(&challenge).unwrap();
    let silent = message::success1(pair.host.transaction, Hash::Sha512, None);
    assert_eq!(pair.host.conclude(&silent), Err(Unproven::Controller(Failure::Failed)));
    // Another name than the one that the secret was made for.
    let mut pair = Pair::quick(false);
    let other = Names { host: "nqn.2026-01.example:host-b".into(), ..names() };
    pair.host = Host::new(other, secret(1), None, null()).unwrap();
    assert_eq!(pair.talk().1, Err(Unproven::Host(Failure::Failed)));
}

#[test]
fn nothing_in_common_is_told() {
    let offer = |hashes: &[Hash], groups: &[Group]| {
        Pair::new(None, None, Offer { hashes: hashes.into(), groups: groups.into() }).talk().1
    };
    assert_eq!(offer(&[], &Group::ALL), Err(Unproven::Host(Failure::NoHash)));
    assert_eq!(offer(&Hash::ALL, &[]), Err(Unproven::Host(Failure::NoGroup)));
    let refused = |change: fn(&mut Vec<u8>)| {
        let mut pair = Pair::quick(false);
        let mut negotiate = pair.host.negotiate();
        change(&mut negotiate);
        pair.controller.take(&negotiate);
        let failure = pair.controller.give();
        assert_eq!((failure.len(), failure[0], failure[1], failure[6]), (8, 0, 0xf1, 1));
        Failure::from_byte(failure[7])
    };
    assert_eq!(refused(|it| it[6] = 1), Failure::SecureChannel);
    assert_eq!(refused(|it| it[7] = 2), Failure::Payload);
    assert_eq!(refused(|it| it[8] = 9), Failure::NoProtocol);
    assert_eq!(refused(|it| it[10] = 31), Failure::Payload);
    assert_eq!(refused(|it| it[11] = 31), Failure::Payload);
    assert_eq!(refused(|it| it[1] = 5), Failure::Message);
    assert_eq!(refused(|it| it.truncate(5)), Failure::Message);
    assert_eq!(refused(|it| it.truncate(71)), Failure::Payload);
    // What a host chose not to offer is not taken.
    let mut host = Pair::quick(false).host;
    let (hash, challenge) = (Hash::Sha256, [1; 32]);
    for (group, public) in [(Group::Ffdhe2048, vec![3; 256]), (Group::Null, vec![3])] {
        let its =
            message::Challenge { hash, group, sequence: 1, challenge: &challenge, public: &public };
        let why = host.reply(&its.encode(host.transaction));
        let reason = if public.len() > 1 { Failure::NoGroup } else { Failure::Payload };
        assert_eq!(why, Err(Unproven::Controller(reason)));
    }
}

/// After so many steps of a good conversation: 0 to 4.
fn after(steps: usize) -> (Pair, Vec<Vec<u8>>) {
    let mut pair = Pair::quick(true);
    let mut sent = vec![pair.host.negotiate()];
    if steps > 0 {
        pair.controller.take(&sent[0]);
    }
    if steps > 1 {
        sent.push(pair.controller.give());
        sent.push(pair.host.reply(&sent[1]).unwrap());
    }
    if steps > 2 {
        pair.controller.take(&sent[2]);
    }
    if steps > 3 {
        sent.push(pair.controller.give());
        sent.push(pair.host.conclude(&sent[3]).unwrap().unwrap());
    }
    (pair, sent)
}

#[test]
fn any_other_order_fails() {
    for steps in 0..=4 {
        let (pair, _) = after(steps);
        let transaction = pair.host.transaction;
        let all: [Vec<u8>; 5] = [
            pair.host.negotiate(),
            after(2).1.pop().expect("a reply"),
            message::success1(transaction, Hash::Sha512, None),
            message::success2(transaction),
            vec![],
        ];
        for (index, message) in all.iter().enumerate() {
            let is_next = matches!((steps, index), (0, 0) | (2, 1) | (4, 3));
            let (mut pair, sent) = after(steps);
            let mut message = message.clone();
            if let (1, Some(reply)) = (index, sent.get(2)) {
                // The right one, also where it was taken already.
                message.clone_from(reply);
            }
            if message.len() > 5 {
                message[4..6].copy_from_slice(&pair.host.transaction.to_le_bytes());
            }
            pair.controller.take(&message);
            if is_next {
                continue;
            }
            assert_eq!(pair.controller.verdict(), None, "it is told first");
            assert_eq!(pair.controller.give()[7], Failure::Message as u8, "{steps} {index}");
            assert_eq!(pair.controller.verdict(), Some(Err(Failure::Message)));
            // And nothing mends it.
            pair.controller.take(&pair.host.negotiate());
            assert!(!matches!(pair.controller.verdict(), Some(Ok(()))));
        }
        // What is fetched before it is there.
        if matches!(steps, 0 | 2 | 4) {
            let (mut pair, _) = after(steps);
            assert_eq!(pair.controller.give()[1], 0xf1);
            assert_eq!(pair.controller.verdict(), Some(Err(Failure::Message)));
        }
        // A host that gives up is not answered.
        let (mut pair, _) = after(steps);
        if steps > 0 {
            pair.controller.take(&pair.host.failure(Failure::NoHash));
            assert_eq!(pair.controller.verdict(), Some(Err(Failure::NoHash)));
        }
    }
}

#[test]
fn without_a_turn_nothing_is_worked_out() {
    let take = |group: Group, turn: fn() -> Option<()>| {
        let mut pair = Pair::new(None, None, Offer { groups: vec![group], ..Offer::default() });
        pair.controller.take_in_turn(&pair.host.negotiate(), turn);
        pair.controller.give()
    };
    let refused = take(Group::Ffdhe2048, || None);
    assert_eq!((refused[1], refused[7]), (0xf1, Failure::Failed as u8));
    assert_ne!(take(Group::Ffdhe2048, || Some(()))[1], 0xf1);
    assert_ne!(take(Group::Null, || panic!("there is nothing to wait for"))[1], 0xf1);
}

#[test]
fn messages_of_another_length_or_content_fail() {
    let (_, sent) = after(2);
    for len in 0..sent[2].len() + 2 {
        if len == sent[2].len() {
            continue;
        }
        let (mut pair, mut sent) = after(2);
        sent[2].resize(len, 0);
        pair.controller.take(&sent[2]);
        assert_eq!(pair.controller.give()[1], 0xf1, "{len} bytes");
        assert!(matches!(pair.controller.verdict(), Some(Err(_))));
    }
    // Each byte of the reply that means something, turned over.
    for at in (0..2).chain(4..7).chain(10..12).chain(16..16 + 64) {
        let (mut pair, mut sent) = after(2);
        sent[2][at] ^= 0x80;
        pair.controller.take(&sent[2]);
        assert_eq!(pair.controller.give()[1], 0xf1, "byte {at}");
    }
    // Of Success1: its kind, transaction, length, and the response.
    for at in (0..2).chain(4..7).chain([8]).chain(16..16 + 64) {
        let (mut pair, _) = after(3);
        let mut success = pair.controller.give();
        success[at] ^= 0x01;
        assert!(pair.host.conclude(&success).is_err(), "byte {at}");
    }
    for len in 0..16 + 64 {
        let (mut pair, _) = after(3);
        let success = pair.controller.give();
        assert!(pair.host.conclude(&success[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn what_was_said_before_is_worth_nothing() {
    let mut pair = Pair::quick(false);
    let (sent, end) = pair.talk();
    assert_eq!(end, Ok(()));
    // The same again, word by word, to a controller that draws another challenge.
    let mut controller = Controller::new(names(), secret(1), None).unwrap();
    controller.take(&sent[0]);
    assert_ne!(controller.give(), sent[1]);
    controller.take(&sent[2]);
    assert_eq!(controller.give()[7], Failure::Failed as u8);
    assert_eq!(controller.verdict(), Some(Err(Failure::Failed)));
}

#[test]
fn any_bytes_are_something_or_a_failure() {
    let mut prng = crate::prng::Prng::from_seed(7);
    for _ in 0..20_000 {
        let steps = prng.index(5);
        let (mut pair, mut sent) = after(steps);
        let mut message = sent.swap_remove(prng.index(sent.len()));
        message.truncate(prng.index(message.len() + 1));
        for _ in 0..prng.index(4) {
            let at = prng.index(message.len().max(1));
            if let Some(byte) = message.get_mut(at) {
                *byte = u8::try_from(prng.below(256)).expect("a byte");
            }
        }
        let _ = pair.host.reply(&message);
        let _ = pair.host.conclude(&message);
        pair.controller.take(&message);
        let _ = pair.controller.give();
    }
}
