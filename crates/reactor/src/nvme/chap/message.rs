//! The messages, as they are sent (Base 8.13.3 and 8.13.5.5). Pure: any bytes decode to something
//! or to a [`Failure`].

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Failure;
use super::group::Group;
use super::hash::Hash;

/// More than any message that is known here has.
pub const MESSAGE_BYTES_MAX: usize = 4096;
/// AUTH_ID of the protocol among those that a host offers.
const DH_HMAC_CHAP: u8 = 1;
/// Most of each kind that a host offers, and where the groups begin among both.
const OFFERS_MAX: usize = 30;
/// RCODE: it has no other.
const AUTHENTICATION_FAILURE: u8 = 1;

/// AUTH_TYPE and AUTH_ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Negotiate,
    Challenge,
    Reply,
    Success1,
    Success2,
    Failure1,
    Failure2,
}

impl Kind {
    fn ids(self) -> (u8, u8) {
        match self {
            Kind::Negotiate => (0, 0x00),
            Kind::Challenge => (1, 0x01),
            Kind::Reply => (1, 0x02),
            Kind::Success1 => (1, 0x03),
            Kind::Success2 => (1, 0x04),
            Kind::Failure1 => (0, 0xf1),
            Kind::Failure2 => (0, 0xf0),
        }
    }

    /// `None`: of another protocol.
    fn from_ids(ids: (u8, u8)) -> Option<Kind> {
        let all = [
            Kind::Negotiate,
            Kind::Challenge,
            Kind::Reply,
            Kind::Success1,
            Kind::Success2,
            Kind::Failure1,
            Kind::Failure2,
        ];
        all.into_iter().find(|kind| kind.ids() == ids)
    }
}

/// What all begin with.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub(super) struct Head {
    auth_type: u8,
    auth_id: u8,
    reserved: [u8; 2],
    /// T_ID.
    transaction: U16,
}

impl Head {
    fn new(kind: Kind, transaction: u16) -> Head {
        let (auth_type, auth_id) = kind.ids();
        Head { auth_type, auth_id, reserved: [0; 2], transaction: transaction.into() }
    }
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct NegotiateHead {
    head: Head,
    /// SC_C.
    secure_channel: u8,
    /// NAPD.
    descriptors: u8,
}

/// One protocol of those that the host offers.
#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Descriptor {
    protocol: u8,
    reserved: u8,
    hashes: u8,
    groups: u8,
    ids: [u8; 2 * OFFERS_MAX],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ChallengeHead {
    head: Head,
    /// HL: of the challenge, which follows.
    hash_bytes: u8,
    reserved: u8,
    hash: u8,
    group: u8,
    /// DHVLEN: of the public value, which follows that.
    public_bytes: U16,
    sequence: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct ReplyHead {
    head: Head,
    /// HL: of the response, which follows, and of the challenge, which follows that.
    hash_bytes: u8,
    reserved_a: u8,
    /// CVALID.
    has_challenge: u8,
    reserved_b: u8,
    /// DHVLEN: of the public value, which is last.
    public_bytes: U16,
    sequence: U32,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Success1Head {
    head: Head,
    /// HL: of the response, which follows if there is one.
    hash_bytes: u8,
    reserved_a: u8,
    /// RVALID.
    has_response: u8,
    reserved_b: [u8; 7],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Success2 {
    head: Head,
    reserved: [u8; 10],
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct FailureMessage {
    head: Head,
    reason: u8,
    explanation: u8,
}

const _: () = assert!(size_of::<NegotiateHead>() + size_of::<Descriptor>() == 72);
const _: () = assert!(size_of::<ChallengeHead>() == 16 && size_of::<ReplyHead>() == 16);
const _: () = assert!(size_of::<Success1Head>() == 16 && size_of::<Success2>() == 16);
const _: () = assert!(size_of::<FailureMessage>() == 8);

/// Which message it is, and of which transaction.
pub(super) fn kind_of(message: &[u8]) -> Option<(Kind, u16)> {
    let (head, _) = Head::read_from_prefix(message).ok()?;
    Some((Kind::from_ids((head.auth_type, head.auth_id))?, head.transaction.get()))
}

/// What a host can do, what it prefers first: AUTH_Negotiate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub hashes: Vec<Hash>,
    pub groups: Vec<Group>,
}

impl Default for Offer {
    fn default() -> Offer {
        let mut offer = Offer { hashes: Hash::ALL.into(), groups: Group::ALL.into() };
        offer.hashes.reverse();
        // All but none, from the smallest.
        offer.groups.rotate_left(1);
        offer
    }
}

impl Offer {
    pub(super) fn encode(&self, transaction: u16) -> Vec<u8> {
        let head = Head::new(Kind::Negotiate, transaction);
        let head = NegotiateHead { head, secure_channel: 0, descriptors: 1 };
        let mut ids = [0; 2 * OFFERS_MAX];
        let (hashes, groups) = ids.split_at_mut(OFFERS_MAX);
        hashes.iter_mut().zip(&self.hashes).for_each(|(place, its)| *place = *its as u8);
        groups.iter_mut().zip(&self.groups).for_each(|(place, its)| *place = *its as u8);
        let descriptor = Descriptor {
            protocol: DH_HMAC_CHAP,
            reserved: 0,
            hashes: short(self.hashes.len()),
            groups: short(self.groups.len()),
            ids,
        };
        [head.as_bytes(), descriptor.as_bytes()].concat()
    }

    /// What is not known here is left out.
    pub(super) fn decode(message: &[u8]) -> Result<Offer, Failure> {
        let (head, rest) =
            NegotiateHead::read_from_prefix(message).map_err(|_| Failure::Payload)?;
        let descriptors = <[Descriptor]>::ref_from_bytes(rest).map_err(|_| Failure::Payload)?;
        if descriptors.len() != usize::from(head.descriptors) {
            return Err(Failure::Payload);
        }
        if head.secure_channel != 0 {
            return Err(Failure::SecureChannel);
        }
        let known = descriptors.iter().find(|its| its.protocol == DH_HMAC_CHAP);
        let known = known.ok_or(Failure::NoProtocol)?;
        let (hashes, groups) = known.ids.split_at(OFFERS_MAX);
        let hashes = hashes.get(..known.hashes.into()).ok_or(Failure::Payload)?;
        let groups = groups.get(..known.groups.into()).ok_or(Failure::Payload)?;
        Ok(Offer {
            hashes: hashes.iter().filter_map(|id| Hash::from_byte(*id)).collect(),
            groups: groups.iter().filter_map(|id| Group::from_byte(*id)).collect(),
        })
    }
}

pub(super) struct Challenge<'a> {
    pub(super) hash: Hash,
    pub(super) group: Group,
    pub(super) sequence: u32,
    pub(super) challenge: &'a [u8],
    pub(super) public: &'a [u8],
}

impl<'a> Challenge<'a> {
    pub(super) fn encode(&self, transaction: u16) -> Vec<u8> {
        let head = ChallengeHead {
            head: Head::new(Kind::Challenge, transaction),
            hash_bytes: short(self.challenge.len()),
            reserved: 0,
            hash: self.hash as u8,
            group: self.group as u8,
            public_bytes: word(self.public.len()),
            sequence: self.sequence.into(),
        };
        [head.as_bytes(), self.challenge, self.public].concat()
    }

    /// Zeroes may follow it.
    pub(super) fn decode(message: &'a [u8]) -> Result<Challenge<'a>, Failure> {
        let (head, rest) = ChallengeHead::ref_from_prefix(message).map_err(|_| Failure::Payload)?;
        let hash = Hash::from_byte(head.hash).ok_or(Failure::NoHash)?;
        let group = Group::from_byte(head.group).ok_or(Failure::NoGroup)?;
        if hash.bytes() != usize::from(head.hash_bytes) {
            return Err(Failure::NoHash);
        }
        let (challenge, rest) = cut(rest, head.hash_bytes.into())?;
        let (public, _) = cut(rest, head.public_bytes.get().into())?;
        Ok(Challenge { hash, group, sequence: head.sequence.get(), challenge, public })
    }
}

pub(super) struct Reply<'a> {
    pub(super) response: &'a [u8],
    /// With its sequence number.
    pub(super) challenge: Option<(&'a [u8], u32)>,
    pub(super) public: &'a [u8],
}

impl<'a> Reply<'a> {
    pub(super) fn encode(&self, transaction: u16) -> Vec<u8> {
        let none = vec![0; self.response.len()];
        let (challenge, sequence) = self.challenge.unwrap_or((&none, 0));
        let head = ReplyHead {
            head: Head::new(Kind::Reply, transaction),
            hash_bytes: short(self.response.len()),
            reserved_a: 0,
            has_challenge: self.challenge.is_some().into(),
            reserved_b: 0,
            public_bytes: word(self.public.len()),
            sequence: sequence.into(),
        };
        [head.as_bytes(), self.response, challenge, self.public].concat()
    }

    /// A challenge without a sequence number is for something else than to be answered.
    pub(super) fn decode(message: &'a [u8], hash: Hash) -> Result<Reply<'a>, Failure> {
        let (head, rest) = ReplyHead::ref_from_prefix(message).map_err(|_| Failure::Payload)?;
        if hash.bytes() != usize::from(head.hash_bytes) {
            return Err(Failure::Payload);
        }
        let (response, rest) = cut(rest, hash.bytes())?;
        let (challenge, public) = cut(rest, hash.bytes())?;
        if public.len() != usize::from(head.public_bytes.get()) {
            return Err(Failure::Payload);
        }
        let sequence = head.sequence.get();
        let is_there = head.has_challenge & 1 != 0 && sequence != 0;
        Ok(Reply { response, challenge: is_there.then_some((challenge, sequence)), public })
    }
}

pub(super) fn success1(transaction: u16, hash: Hash, response: Option<&[u8]>) -> Vec<u8> {
    let head = Success1Head {
        head: Head::new(Kind::Success1, transaction),
        hash_bytes: short(hash.bytes()),
        reserved_a: 0,
        has_response: response.is_some().into(),
        reserved_b: [0; 7],
    };
    [head.as_bytes(), response.unwrap_or_default()].concat()
}

/// The controller's response, if there is one; zeroes may follow.
pub(super) fn read_success1(message: &[u8], hash: Hash) -> Result<Option<&[u8]>, Failure> {
    let (head, rest) = Success1Head::ref_from_prefix(message).map_err(|_| Failure::Payload)?;
    if head.has_response & 1 == 0 {
        return Ok(None);
    }
    if hash.bytes() != usize::from(head.hash_bytes) {
        return Err(Failure::Payload);
    }
    Ok(Some(cut(rest, hash.bytes())?.0))
}

pub(super) fn success2(transaction: u16) -> Vec<u8> {
    let message = Success2 { head: Head::new(Kind::Success2, transaction), reserved: [0; 10] };
    message.as_bytes().to_vec()
}

pub(super) fn is_success2(message: &[u8]) -> bool {
    message.len() == size_of::<Success2>()
}

/// AUTH_Failure1 of a controller, AUTH_Failure2 of a host.
pub(super) fn failure(kind: Kind, transaction: u16, why: Failure) -> Vec<u8> {
    let head = Head::new(kind, transaction);
    let message = FailureMessage { head, reason: AUTHENTICATION_FAILURE, explanation: why as u8 };
    message.as_bytes().to_vec()
}

pub(super) fn read_failure(message: &[u8]) -> Failure {
    let found = FailureMessage::ref_from_prefix(message);
    found.map_or(Failure::Failed, |(its, _)| Failure::from_byte(its.explanation))
}

fn cut(bytes: &[u8], at: usize) -> Result<(&[u8], &[u8]), Failure> {
    bytes.split_at_checked(at).ok_or(Failure::Payload)
}

fn short(len: usize) -> u8 {
    u8::try_from(len).expect("a digest, or some identifiers")
}

fn word(len: usize) -> U16 {
    U16::new(u16::try_from(len).expect("8192 bits at most"))
}
