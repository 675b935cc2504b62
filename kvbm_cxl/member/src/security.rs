// SPDX-License-Identifier: Apache-2.0
//! How this program proves to etcd who it is, and how etcd proves itself: TLS, client certificates, user and password.

use crate::error::{Error, Result};
use clap::Args;
use etcd_client::{Certificate, ConnectOptions, Identity, TlsOptions};
use std::path::{Path, PathBuf};

/// Options of the connection. Certificates and the password are read when a connection is made.
#[derive(Args, Clone, Debug, Default)]
pub struct Security {
    /// PEM file with the authorities for etcd's certificate (https:// endpoints).
    #[arg(long, env = "ETCD_CACERT", value_name = "FILE")]
    cacert: Option<PathBuf>,
    /// PEM file with this host's certificate, if etcd requires one.
    #[arg(long, env = "ETCD_CERT", value_name = "FILE", requires = "key")]
    cert: Option<PathBuf>,
    /// PEM file with the key of --cert.
    #[arg(long, env = "ETCD_KEY", value_name = "FILE", requires = "cert")]
    key: Option<PathBuf>,
    /// Name in etcd's certificate, if it differs from the endpoint's host name.
    #[arg(long, env = "ETCD_SERVER_NAME", value_name = "NAME")]
    server_name: Option<String>,
    /// User of etcd, if it requires one.
    #[arg(long, env = "ETCD_USER", value_name = "NAME", requires = "password_source")]
    user: Option<String>,
    /// File whose first line is the password of --user.
    #[arg(long, env = "ETCD_PASSWORD_FILE", value_name = "FILE", group = "password_source")]
    password_file: Option<PathBuf>,
    /// The password. Environment only: every user of the machine can read command lines.
    #[arg(long, env = "ETCD_PASSWORD", value_name = "TEXT", group = "password_source", hide = true, hide_env_values = true)]
    password: Option<String>,
}

impl Security {
    /// Adds them to the options of a connection to `endpoints`.
    ///
    /// # Errors
    /// [`Error::Os`] naming a file that cannot be read; [`Error::Security`] for options that do not go together.
    pub fn apply(&self, endpoints: &[String], options: ConnectOptions) -> Result<ConnectOptions> {
        let wants_tls = self.cacert.is_some() || self.cert.is_some() || self.server_name.is_some();
        let plain = endpoints.iter().find(|endpoint| !endpoint.starts_with("https://"));
        if let (true, Some(plain)) = (wants_tls, plain) {
            return Err(Error::Security(format!("the endpoint {plain} is without TLS, but certificates are given: write https://")));
        }
        let mut options = options;
        if plain.is_none() {
            let Some(cacert) = &self.cacert else {
                return Err(Error::Security("endpoints with https:// need --cacert: the authority of etcd's certificate".into()));
            };
            let mut tls = TlsOptions::new().ca_certificate(Certificate::from_pem(pem(cacert, "CERTIFICATE")?));
            if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
                tls = tls.identity(Identity::from_pem(pem(cert, "CERTIFICATE")?, pem(key, "PRIVATE KEY")?));
            }
            if let Some(name) = &self.server_name {
                tls = tls.domain_name(name);
            }
            options = options.with_tls(tls);
        }
        if let Some(user) = &self.user {
            options = options.with_user(user, self.password()?);
            // A token ends some minutes after it was given.
            options = options.with_auto_token_refresh(true);
        }
        Ok(options)
    }

    /// The credentials that etcd sees, for errors: a server that wants a certificate and sees none closes the connection without a word.
    pub fn shown(&self, endpoints: &[String]) -> String {
        let certificate = match &self.cert {
            _ if !endpoints.iter().any(|endpoint| endpoint.starts_with("https://")) => "without TLS".into(),
            Some(cert) => format!("with the certificate {}", cert.display()),
            None => "with no certificate of this host (--cert)".into(),
        };
        self.user.as_ref().map_or(certificate.clone(), |user| format!("{certificate}, as user {user}"))
    }

    /// Whether etcd is asked for a token.
    pub fn has_user(&self) -> bool {
        self.user.is_some()
    }

    fn password(&self) -> Result<String> {
        if let Some(path) = &self.password_file {
            let text = read(path)?;
            let text = String::from_utf8(text).map_err(|_| Error::Security(format!("{} is not text", path.display())))?;
            return Ok(text.lines().next().unwrap_or_default().to_owned());
        }
        Ok(self.password.clone().unwrap_or_default())
    }
}

/// A PEM file that has to hold something named `what`.
fn pem(path: &Path, what: &str) -> Result<Vec<u8>> {
    let bytes = read(path)?;
    let has_it = String::from_utf8_lossy(&bytes).lines().any(|line| line.starts_with("-----BEGIN ") && line.contains(what));
    if has_it { Ok(bytes) } else { Err(Error::Security(format!("{} holds no {what} in PEM", path.display()))) }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|source| Error::Os { what: format!("reading {}", path.display()), source })
}

#[cfg(test)]
mod tests;
