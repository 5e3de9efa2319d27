//! A connection while it is set up: PDU by PDU, on a thread that may wait, for so long and no
//! longer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use ashlar_reactor::nvme::chap::Failure;
use ashlar_reactor::nvme::command::{Command, Completion, Status};
use ashlar_reactor::nvme::pdu::{
    COMMON_BYTES, CapsuleResp, Common, DIGEST_BYTES, Data, Digests, Fault, H2C_DATA_BYTES_MIN,
    IcReq, IcResp, Kind, LAST, R2t, Shape, TermReq, VERSION, crc32c, header,
};
use zerocopy::IntoBytes;

use crate::line::now;
use crate::nvme_tcp::identify::TRANSFER_BYTES_MAX;
use crate::nvme_tcp::inbox::{CapsuleData, Found, PDU_BYTES_MAX, look};
use crate::nvme_tcp::transfers::{Closed, Transfers};

/// Data to the host begins at a multiple of 4 to 128 bytes (section 3.6.2.2).
const ALIGNMENT_MAX: u8 = 31;
const _: () = assert!(TRANSFER_BYTES_MAX >= H2C_DATA_BYTES_MIN);

/// Why nothing came of it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Refused {
    #[error("{0}")]
    Io(#[from] std::io::Error),
    #[error("it has sent what it must not: {0}")]
    Fault(Fault),
    #[error("{0}")]
    Connect(String),
    #[error("it has not proven who it is: {0}")]
    Unproven(Failure),
    /// As it has said itself (AUTH_Failure2).
    #[error("it has refused this side: {0}{hint}", hint = hint_of(.0))]
    ByHost(Failure),
    #[error("it is not served any more")]
    Gone,
}

/// What helps where a host has not believed our proof.
fn hint_of(why: &Failure) -> &'static str {
    match *why == Failure::Failed {
        true => "; perhaps the controller secret that it has is another than the one here",
        false => "",
    }
}

/// Where in Connect a parameter that was refused is (figure 382: IPO, IATTR).
#[derive(Clone, Copy)]
pub(crate) enum At {
    Command(u32),
    Data(u32),
    Nowhere,
}

/// What the host is told in place of being served.
pub(crate) struct Rejection {
    pub(crate) status: Status,
    at: At,
    pub(crate) why: String,
}

impl Rejection {
    pub(crate) fn new(status: Status, at: At, why: impl Into<String>) -> Rejection {
        Rejection { status, at, why: why.into() }
    }
}

/// The connection while it is set up.
pub(crate) struct Wire {
    pub(crate) stream: TcpStream,
    /// Nothing is waited for any longer.
    pub(crate) until: Instant,
    digests: Digests,
    /// Of data to the host (HPDA).
    alignment: u8,
    /// So many commands were taken.
    taken: u16,
}

/// A command that the host has sent.
pub(crate) struct Taken {
    pub(crate) command: Command,
    /// What came with it; `None`: it does not fit its digest.
    pub(crate) data: Option<Vec<u8>>,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream, within: Duration) -> Wire {
        let (digests, until) = (Digests::default(), now() + within);
        Wire { stream, until, digests, alignment: 0, taken: 0 }
    }

    pub(crate) fn digests(&self) -> Digests {
        self.digests
    }

    pub(crate) fn alignment(&self) -> u8 {
        self.alignment
    }

    /// How far a queue of so many entries was read.
    pub(crate) fn head(&self, entries: u16) -> u16 {
        self.taken % entries
    }

    /// The time that is left; an error: none.
    pub(crate) fn check_time(&self) -> Result<Duration, std::io::Error> {
        let left = self.until.saturating_duration_since(now());
        if left.is_zero() {
            let text = "it did not go on in time";
            return Err(std::io::Error::new(std::io::ErrorKind::TimedOut, text));
        }
        Ok(left)
    }

    fn read(&mut self, into: &mut [u8]) -> Result<(), std::io::Error> {
        let mut done = 0;
        while let Some(rest) = into.get_mut(done..).filter(|rest| !rest.is_empty()) {
            let left = self.check_time()?;
            self.stream.set_read_timeout(Some(left))?;
            match self.stream.read(rest) {
                Ok(0) => {
                    let text = "it has closed the connection before it was set up";
                    return Err(std::io::Error::new(std::io::ErrorKind::UnexpectedEof, text));
                }
                Ok(more) => done += more,
                // Looked at again above.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), std::io::Error> {
        let left = self.until.saturating_duration_since(now()).max(Duration::from_millis(1));
        self.stream.set_write_timeout(Some(left))?;
        self.stream.write_all(bytes)
    }

    /// The first PDUs of both sides: digests, and the alignment of data to the host.
    pub(crate) fn agree(&mut self) -> Result<(), Refused> {
        let mut bytes = [0; size_of::<IcReq>()];
        self.read(&mut bytes[..COMMON_BYTES])?;
        if let Err(fault) = begins_well(&bytes) {
            return Err(self.end(fault, &bytes[..COMMON_BYTES]));
        }
        self.read(&mut bytes[COMMON_BYTES..])?;
        let request: IcReq = header(&bytes).ok_or(Refused::Fault(Fault::Header(4)))?;
        let fault = match (request.version.get(), request.alignment) {
            (VERSION, 0..=ALIGNMENT_MAX) => None,
            (VERSION, _) => Some(Fault::Header(10)),
            (_, _) => Some(Fault::Unsupported(8)),
        };
        if let Some(fault) = fault {
            return Err(self.end(fault, &bytes));
        }
        let digests = Digests::from_byte(request.digests);
        let shape = Shape::new(Kind::IcResp, 0, 0, Digests::default());
        let response = IcResp {
            common: shape.common(0),
            version: VERSION.into(),
            alignment: 0,
            digests: digests.to_byte(),
            h2c_data_bytes_max: TRANSFER_BYTES_MAX.into(),
            reserved: [0; 112],
        };
        self.write(response.as_bytes())?;
        (self.digests, self.alignment) = (digests, request.alignment);
        Ok(())
    }

    /// The next command of the host.
    pub(crate) fn take(&mut self) -> Result<Taken, Refused> {
        let (bytes, found) = self.read_pdu(Kind::CapsuleCmd)?;
        let Found::Command { command, data, .. } = found else {
            return Err(self.end(Fault::Sequence, &bytes));
        };
        self.taken = self.taken.wrapping_add(1);
        let data = match data {
            CapsuleData::None => Some(Vec::new()),
            CapsuleData::At(range) => Some(bytes.get(range).unwrap_or_default().to_vec()),
            CapsuleData::Damaged => None,
        };
        Ok(Taken { command, data })
    }

    /// Asks for data of a command, and waits for it. `None`: it does not fit its digest.
    pub(crate) fn fetch(
        &mut self,
        command: &Command,
        len: u32,
    ) -> Result<Option<Vec<u8>>, Refused> {
        let mut transfers = Transfers::new(1);
        let tag = transfers.open(command.id(), len, ()).ok_or(Refused::Gone)?;
        let shape = Shape::new(Kind::R2t, 0, 0, self.digests);
        let request = R2t::whole(&shape, command.id(), tag, len);
        self.write(&shape.written(&request, &[]))?;
        let mut data = Vec::new();
        while !transfers.is_complete(tag) {
            let (head, found) = self.read_pdu(Kind::H2cData)?;
            let Found::Data { of, digest, .. } = found else {
                return Err(self.end(Fault::Sequence, &head));
            };
            if let Err(fault) = transfers.accept(&of) {
                return Err(self.end(fault, &head));
            }
            let begin = data.len();
            data.resize(begin + of.len as usize, 0);
            let part = data.get_mut(begin..).unwrap_or_default();
            self.read(part)?;
            let mut its = [0; DIGEST_BYTES];
            if digest {
                self.read(&mut its)?;
            }
            transfers.came(&of, !digest || crc32c(part).to_le_bytes() == its);
        }
        Ok((transfers.close(tag) == Closed::Whole).then_some(data))
    }

    /// The next PDU, which has to be of this kind: all of a command, of data the header.
    fn read_pdu(&mut self, kind: Kind) -> Result<(Vec<u8>, Found), Refused> {
        let mut bytes = vec![0; COMMON_BYTES];
        self.read(&mut bytes)?;
        let common: Common = header(&bytes).ok_or(Refused::Fault(Fault::Header(4)))?;
        let shape = Shape::read(&common, self.digests).and_then(|shape| {
            let len = if kind == Kind::H2cData { shape.data_at } else { shape.bytes() };
            match (shape.kind == kind, len <= PDU_BYTES_MAX) {
                (true, true) => Ok(len),
                (true, false) => Err(Fault::LimitExceeded),
                (false, _) => Err(Fault::Sequence),
            }
        });
        let len = shape.map_err(|fault| self.end(fault, &bytes))?;
        bytes.resize(len, 0);
        self.read(&mut bytes[COMMON_BYTES..])?;
        let found = look(&bytes, self.digests).map_err(|fault| self.end(fault, &bytes))?;
        Ok((bytes, found))
    }

    /// Refuses Connect, and closes.
    pub(crate) fn reject(
        &mut self,
        command: &Command,
        rejection: &Rejection,
    ) -> Result<(), Refused> {
        let result = match rejection.at {
            At::Command(at) => at,
            At::Data(at) => at | 1 << 16,
            At::Nowhere => 0,
        };
        self.complete(command, rejection.status, result, 0)?;
        self.farewell();
        Ok(())
    }

    /// Data for the host, all at once.
    pub(crate) fn give(&mut self, command: &Command, data: &[u8]) -> Result<(), Refused> {
        let shape = Shape::new(Kind::C2hData, data.len(), self.alignment, self.digests);
        let header = Data::whole(&shape, LAST, command.id());
        Ok(self.write(&shape.written(&header, data))?)
    }

    /// `submission_head`: how far the queue was read.
    pub(crate) fn complete(
        &mut self,
        command: &Command,
        status: Status,
        result: u32,
        submission_head: u16,
    ) -> Result<(), Refused> {
        let shape = Shape::new(Kind::CapsuleResp, 0, 0, self.digests);
        let completion = Completion {
            result,
            result_high: 0,
            submission_head,
            queue: 0,
            id: command.id(),
            phase: false,
            status,
        };
        let header = CapsuleResp { common: shape.common(0), completion: completion.to_bytes() };
        Ok(self.write(&shape.written(&header, &[]))?)
    }

    /// Tells the host what it has done wrong.
    pub(crate) fn end(&mut self, fault: Fault, about: &[u8]) -> Refused {
        let quote = about.get(..about.len().min(COMMON_BYTES)).unwrap_or_default();
        let shape = Shape::quoting(Kind::C2hTermReq, quote.len());
        let term = TermReq::new(&shape, fault);
        let told = self.write(&[term.as_bytes(), quote].concat());
        if told.is_ok() {
            self.farewell();
        }
        Refused::Fault(fault)
    }

    /// Closes our end; the host gets what was sent, if it reads on.
    pub(crate) fn farewell(&mut self) {
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
        let mut rest = [0; 512];
        self.until = self.until.min(now() + Duration::from_secs(1));
        // What it still sends would make the kernel drop what was sent to it.
        while self.read(&mut rest).is_ok() {}
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
    }
}

fn begins_well(bytes: &[u8]) -> Result<(), Fault> {
    let common: Common = header(bytes).ok_or(Fault::Header(4))?;
    let shape = Shape::read(&common, Digests::default())?;
    if shape.kind == Kind::IcReq { Ok(()) } else { Err(Fault::Sequence) }
}
