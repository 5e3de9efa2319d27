//! A connection with one command at a time, for who can wait: it sets things up, and asks.
//!
//! Sections are of the NVM Express TCP Transport Specification 1.0.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt::{set_socket_linger, set_tcp_user_timeout};
use zerocopy::IntoBytes;
use zerocopy::byteorder::little_endian::{U16, U32};

use super::Trouble;
use crate::clock::machine_time;
use crate::nvme::command::{Command, Completion, Sgl};
use crate::nvme::pdu::{
    self, CapsuleCmd, CapsuleResp, Common, DIGEST_BYTES, Data, DataDigest, Digests, Fault,
    H2C_DATA_BYTES_MIN, IcReq, IcResp, Kind, LAST, R2t, SUCCESS, Shape, VERSION,
};

/// How long the other side may take to accept a connection.
const ACCEPT_WITHIN: Duration = Duration::from_secs(2);
/// How long it may take for the first PDU.
const GREET_WITHIN: Duration = Duration::from_secs(2);

/// For how long the kernel tries to have something heard: so much later than it was given to it,
/// nothing is written any more (`lease` counts on that).
const UNHEARD_MAX: Duration = Duration::from_secs(4);

/// Data of a command.
pub(super) enum Payload<'a> {
    None,
    /// It fills this.
    In(&'a mut [u8]),
    Out(&'a [u8]),
}

pub(super) struct Wire {
    stream: TcpStream,
    pub(super) digests: Digests,
    /// CPDA.
    pub(super) alignment: u8,
    /// MAXH2CDATA.
    pub(super) h2c_data_bytes_max: u32,
    /// Most data that goes with a command, in bytes.
    pub(super) capsule_bytes: usize,
    id: u16,
}

impl Wire {
    /// Connects, and agrees on digests: both sides have to want them.
    pub(super) fn open(address: SocketAddr, digests: Digests) -> Result<Wire, Trouble> {
        let connected = TcpStream::connect_timeout(&address, ACCEPT_WITHIN);
        let stream = connected.map_err(|error| Trouble::Unreachable(error.to_string()))?;
        stream.set_nodelay(true)?;
        // Closing it ends it: nothing that waits here is sent after that. Nor does the kernel send
        // again for longer, also if this process is stopped meanwhile.
        set_socket_linger(&stream, Some(Duration::ZERO)).map_err(io::Error::from)?;
        let unheard_ms = u32::try_from(UNHEARD_MAX.as_millis()).expect("seconds");
        set_tcp_user_timeout(&stream, unheard_ms).map_err(io::Error::from)?;
        let mut wire = Wire {
            stream,
            digests: Digests::default(),
            alignment: 0,
            h2c_data_bytes_max: H2C_DATA_BYTES_MIN,
            capsule_bytes: 0,
            id: 0,
        };
        wire.greet(digests)?;
        Ok(wire)
    }

    /// Section 3.6.2.2 and 3.6.2.3: what both sides say first.
    fn greet(&mut self, wanted: Digests) -> Result<(), Trouble> {
        let shape = Shape::new(Kind::IcReq, 0, 0, Digests::default());
        let ours = IcReq {
            common: shape.common(0),
            version: U16::new(VERSION),
            alignment: 0,
            digests: wanted.to_byte(),
            // One R2T of a command at a time.
            r2t_max: U32::new(0),
            reserved: [0; 112],
        };
        let until = machine_time() + GREET_WITHIN;
        self.send(ours.as_bytes(), until, "its first PDU")?;
        let mut bytes = [0; pdu::HEADER_BYTES_MAX];
        self.receive(&mut bytes[..pdu::COMMON_BYTES], until, "its first PDU")?;
        let common = pdu::header::<Common>(&bytes).ok_or(Fault::Header(0))?;
        let shape = Shape::read(&common, Digests::default())?;
        if shape.kind == Kind::C2hTermReq {
            return Err(Trouble::Absurd("it ends the connection before it begins"));
        }
        if shape.kind != Kind::IcResp {
            return Err(Trouble::Absurd("it does not begin as NVMe/TCP does"));
        }
        self.receive(&mut bytes[pdu::COMMON_BYTES..], until, "its first PDU")?;
        let its = pdu::header::<IcResp>(&bytes).ok_or(Fault::Header(0))?;
        if its.version.get() != VERSION {
            return Err(Trouble::Absurd("it speaks another version of NVMe/TCP"));
        }
        if its.alignment > 31 {
            return Err(Fault::Header(10).into());
        }
        if its.h2c_data_bytes_max.get() < H2C_DATA_BYTES_MIN {
            return Err(Fault::Header(12).into());
        }
        let agreed = Digests::from_byte(its.digests);
        if agreed.and(wanted) != agreed {
            return Err(Trouble::Absurd("it has digests that were not asked for"));
        }
        if wanted.header && !agreed.header || wanted.data && !agreed.data {
            return Err(Trouble::NoDigests);
        }
        self.digests = agreed;
        self.alignment = its.alignment;
        self.h2c_data_bytes_max = its.h2c_data_bytes_max.get();
        Ok(())
    }

    /// The socket, for who goes on with it.
    pub(super) fn into_stream(self) -> std::io::Result<TcpStream> {
        self.stream.set_read_timeout(None)?;
        self.stream.set_write_timeout(None)?;
        Ok(self.stream)
    }

    /// Another hold on the socket.
    pub(super) fn tap(&self) -> Option<TcpStream> {
        self.stream.try_clone().ok()
    }

    pub(super) fn address(&self) -> Result<SocketAddr, Trouble> {
        Ok(self.stream.peer_addr()?)
    }

    /// Sends a command and waits for its completion. Of `what` speak errors. No bytes at all, sent
    /// or asked for, are one: they could come again and again.
    pub(super) fn call(
        &mut self,
        command: Command,
        mut payload: Payload<'_>,
        within: Duration,
        what: &'static str,
    ) -> Result<Completion, Trouble> {
        let until = machine_time() + within;
        self.id = self.id.wrapping_add(1);
        self.send_command(command, &payload, until, what)?;
        let (mut received, mut granted) = (0, 0);
        loop {
            let mut head = [0; pdu::DATA_AT_MAX + pdu::QUOTE_BYTES_MAX];
            self.receive(&mut head[..pdu::COMMON_BYTES], until, what)?;
            let common = pdu::header::<Common>(&head).ok_or(Fault::Header(0))?;
            let shape = Shape::read(&common, self.digests)?;
            let has_data = shape.kind == Kind::C2hData && shape.data_bytes > 0;
            let len = if has_data { shape.data_at } else { shape.bytes() };
            let rest = head.get_mut(pdu::COMMON_BYTES..len).ok_or(Fault::Header(4))?;
            self.receive(rest, until, what)?;
            shape.check_head(&head)?;
            match shape.kind {
                Kind::CapsuleResp => {
                    let its = pdu::header::<CapsuleResp>(&head).ok_or(Fault::Header(4))?;
                    let completion = Completion::from_bytes(&its.completion);
                    if completion.id != self.id {
                        return Err(Trouble::Absurd("an answer to a command that is not out"));
                    }
                    check_whole(&payload, &completion, (received, granted, self.capsule_bytes))?;
                    return Ok(completion);
                }
                Kind::C2hData => {
                    let its = pdu::header::<Data>(&head).ok_or(Fault::Header(4))?;
                    let Payload::In(into) = &mut payload else {
                        return Err(Fault::Sequence.into());
                    };
                    let at = its.offset.get() as usize;
                    let place = into.get_mut(at..at + shape.data_bytes);
                    let place = place.filter(|its| at == received && !its.is_empty());
                    let place = place.filter(|_| its.command.get() == self.id);
                    let place = place.ok_or(Fault::OutOfRange)?;
                    self.receive_data(place, shape.data_digest, until, what)?;
                    received += shape.data_bytes;
                    if common.flags & SUCCESS != 0 {
                        let dwords = [0, 0, 0, u32::from(self.id)];
                        let completion = Completion::from_dwords(dwords);
                        check_whole(&payload, &completion, (received, granted, 0))?;
                        return Ok(completion);
                    }
                }
                Kind::R2t => {
                    let its = pdu::header::<R2t>(&head).ok_or(Fault::Header(4))?;
                    let Payload::Out(from) = &payload else { return Err(Fault::Sequence.into()) };
                    let (at, len) = (its.offset.get() as usize, its.len.get() as usize);
                    let asked = from.get(at..at + len).filter(|its| !its.is_empty());
                    let asked = asked.filter(|_| at == granted && its.command.get() == self.id);
                    self.send_data(asked.ok_or(Fault::OutOfRange)?, &its, until, what)?;
                    granted += len;
                }
                Kind::C2hTermReq => {
                    return Err(Trouble::Lost("it has ended the connection".into()));
                }
                Kind::IcReq
                | Kind::IcResp
                | Kind::H2cTermReq
                | Kind::CapsuleCmd
                | Kind::H2cData => return Err(Fault::Sequence.into()),
            }
        }
    }

    fn send_command(
        &mut self,
        command: Command,
        payload: &Payload<'_>,
        until: Duration,
        what: &'static str,
    ) -> Result<(), Trouble> {
        let length = |len: usize| u32::try_from(len).expect("data of a command");
        let (data, sgl): (&[u8], _) = match payload {
            Payload::None => (&[], Sgl::Transport { bytes: 0 }),
            Payload::In(into) => (&[], Sgl::Transport { bytes: length(into.len()) }),
            Payload::Out(from) if from.len() <= self.capsule_bytes => {
                (from, Sgl::InCapsule { offset: 0, bytes: length(from.len()) })
            }
            Payload::Out(from) => (&[], Sgl::Transport { bytes: length(from.len()) }),
        };
        let command = command.with_id(self.id).with_sgl(sgl).to_bytes();
        let shape = Shape::new(Kind::CapsuleCmd, data.len(), self.alignment, self.digests);
        let capsule = CapsuleCmd { common: shape.common(0), command };
        self.send(&shape.written(&capsule, data), until, what)
    }

    /// What an R2T has asked for.
    fn send_data(
        &mut self,
        data: &[u8],
        asked: &R2t,
        until: Duration,
        what: &'static str,
    ) -> Result<(), Trouble> {
        let mut at = asked.offset.get();
        let most = usize::try_from(self.h2c_data_bytes_max).expect("32 bits");
        let mut parts = data.chunks(most).peekable();
        while let Some(part) = parts.next() {
            let flags = if parts.peek().is_none() { LAST } else { 0 };
            let len = u32::try_from(part.len()).expect("no more than was asked for");
            let shape = Shape::new(Kind::H2cData, part.len(), self.alignment, self.digests);
            let (command, tag) = (asked.command, asked.tag);
            let (common, offset) = (shape.common(flags), U32::new(at));
            let header =
                Data { common, command, tag, offset, len: U32::new(len), reserved: [0; 4] };
            self.send(&shape.written(&header, part), until, what)?;
            at += len;
        }
        Ok(())
    }

    /// All of it, before `until`: however little is taken at a time.
    fn send(
        &mut self,
        mut bytes: &[u8],
        until: Duration,
        what: &'static str,
    ) -> Result<(), Trouble> {
        while !bytes.is_empty() {
            let left = until.saturating_sub(machine_time());
            if left.is_zero() {
                return Err(Trouble::Silent(what));
            }
            self.stream.set_write_timeout(Some(left))?;
            match self.stream.write(bytes) {
                Ok(0) => return Err(Trouble::Lost("it has closed the connection".into())),
                Ok(taken) => bytes = &bytes[taken..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The time is over: the clock above says so, too.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn receive_data(
        &mut self,
        into: &mut [u8],
        has_digest: bool,
        until: Duration,
        what: &'static str,
    ) -> Result<(), Trouble> {
        self.receive(into, until, what)?;
        if !has_digest {
            return Ok(());
        }
        let mut found = [0; DIGEST_BYTES];
        self.receive(&mut found, until, what)?;
        let mut digest = DataDigest::default();
        digest.update(into);
        match digest.finish() == u32::from_le_bytes(found) {
            true => Ok(()),
            false => Err(Trouble::Lost("a digest of data is wrong".into())),
        }
    }

    /// Fills `into` before `until`.
    fn receive(
        &mut self,
        mut into: &mut [u8],
        until: Duration,
        what: &'static str,
    ) -> Result<(), Trouble> {
        // This process may have stood still: what has come by then is in time.
        let mut is_last = false;
        while !into.is_empty() {
            if is_last {
                return Err(Trouble::Silent(what));
            }
            let least = Duration::from_millis(1);
            let left = until.saturating_sub(machine_time());
            is_last = left < least;
            self.stream.set_read_timeout(Some(left.max(least)))?;
            match self.stream.read(into) {
                Ok(0) => return Err(Trouble::Lost("it has closed the connection".into())),
                Ok(more) => into = &mut into[more..],
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The time is over: the clock above says so, too.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Whether a success is one: all data was moved.
fn check_whole(
    payload: &Payload<'_>,
    completion: &Completion,
    (received, granted, capsule_bytes): (usize, usize, usize),
) -> Result<(), Trouble> {
    let whole = match payload {
        Payload::None => true,
        Payload::In(into) => received == into.len(),
        Payload::Out(from) => from.len() <= capsule_bytes || granted == from.len(),
    };
    match whole || !completion.status.is_success() {
        true => Ok(()),
        false => Err(Trouble::Absurd("a success without all of the data")),
    }
}
