//! TCP connections that exports serve.

use std::net::TcpStream;
use std::time::Duration;

use rustix::net::sockopt;

/// What is not acknowledged for so long is a host that is gone.
const UNACKNOWLEDGED_MAX: Duration = Duration::from_secs(60);
/// A silent connection is tried after this time, and again as often.
const PROBE_EVERY: Duration = Duration::from_secs(15);
const PROBES: u32 = 3;

/// A host that died without a word does not keep its place for ever; answers are not held back.
pub(crate) fn prepare(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepintvl(stream, PROBE_EVERY)?;
    sockopt::set_tcp_keepcnt(stream, PROBES)?;
    let unacknowledged = u32::try_from(UNACKNOWLEDGED_MAX.as_millis()).unwrap_or(u32::MAX);
    sockopt::set_tcp_user_timeout(stream, unacknowledged)?;
    Ok(())
}
