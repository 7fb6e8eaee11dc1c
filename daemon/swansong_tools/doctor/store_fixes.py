# SPDX-License-Identifier: Apache-2.0
"""Fixes for refusals of a store: commands for AWS, Google and Azure, instructions for other stores."""

from __future__ import annotations

import errno
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from swansong_bucket.config.values import directory_of
from swansong_bucket.errors import Forbidden, NotFound, StoreError, Transient
from swansong_bucket.stores.azure import auth
from swansong_bucket.stores.base import (
    account_container_and_prefix,
    bucket_and_prefix,
    is_certificate_problem,
)
from swansong_bucket.stores.file import mount_points
from swansong_bucket.stores.s3.access import CREDENTIALS_HINT, Unsupported
from swansongd.config.config import Config

from swansong_tools.doctor import fixes, staging
from swansong_tools.doctor.installation import DAEMON_USER
from swansong_tools.paths import exists

_AWS_FILES = (
    ("AWS_SHARED_CREDENTIALS_FILE", "/etc/swansong/aws/credentials"),
    ("AWS_CONFIG_FILE", "/etc/swansong/aws/config"),
)
_GCP_FILES = (
    (
        "GOOGLE_APPLICATION_CREDENTIALS",
        "/etc/swansong/gcloud/application_default_credentials.json",
    ),
)
"""Variables of the unit and their files; fixes write the operator's credentials to the first file."""
_PROVIDERS = {
    "s3": (".amazonaws.com", ".amazonaws.com.cn"),
    "gs": (".googleapis.com",),
    "az": (".core.windows.net", ".core.usgovcloudapi.net", ".core.chinacloudapi.cn"),
}


def address(config: Config) -> str:
    """The URL of the store's server; empty for a directory."""
    if config.store.endpoint:
        return config.store.endpoint
    if _is_azure(config):
        account, _, _ = account_container_and_prefix(config.store.url)
        return f"https://{account}.blob.core.windows.net"
    if _is_s3(config):
        region = config.store.region
        return f"https://s3.{region}.amazonaws.com" if region else "https://s3.amazonaws.com"
    return "https://storage.googleapis.com" if config.store.url.startswith("gs://") else ""


def trusted(config: Config) -> str | None:
    """The CA bundle of the store's connections; None for that of the system."""
    if config.store.ca_bundle is not None:
        return str(config.store.ca_bundle)
    return os.environ.get("AWS_CA_BUNDLE" if _is_s3(config) else "REQUESTS_CA_BUNDLE") or None


def is_providers_own(config: Config) -> bool:
    """Whether AWS, Google or Azure hosts the bucket, rather than a compatible store."""
    host = urlsplit(address(config)).hostname or ""
    return host.endswith(_PROVIDERS.get(config.store.url.partition("://")[0], ("-",)))


def of_refusal(config: Config, path: Path, error: StoreError, operator_file: str = "") -> str:
    """The fix for a refusal of the store, by the class of the error; empty if its hint is the fix.

    Args:
        path: configuration file.
        operator_file: see :func:`of_credentials`.
    """
    if root := directory_of(config.store.url):
        return _of_directory(root, error)
    if is_certificate_problem(error):
        return fixes.set_key(path, 'ca_bundle = "/PATH/OF/AUTHORITY.pem" in [store]')
    if _is_azure(config):
        return _of_azure(config, error)
    bucket, prefix = bucket_and_prefix(config.store.url)
    is_own = is_providers_own(config)
    if isinstance(error, NotFound):
        if _is_s3(config):
            return aws(config, f"aws s3 mb s3://{bucket}")
        return (
            f"gcloud storage buckets create gs://{bucket}"
            if is_own
            else f"# at {address(config)}, create the bucket {bucket}, or change store.url"
        )
    if isinstance(error, Unsupported):
        return f"# {address(config)} lacks a request that Swansong needs: set store.url to another store"
    if isinstance(error, Transient):
        return request_by_hand(config)
    is_unknown_to_google = is_own and not _is_s3(config) and not isinstance(error, Forbidden)
    if error.hint == CREDENTIALS_HINT or is_unknown_to_google:
        return of_credentials(config, operator_file)
    if not is_own:
        return (
            f"# at {address(config)}, allow the daemon's credentials to list the bucket {bucket}, and to "
            f"read and create objects below {prefix or 'its root'}"
        )
    if _is_s3(config):
        return (
            "aws iam put-role-policy --role-name ROLE --policy-name swansong "
            "--policy-document file://aws-vm.json  # the policy is in packer/permissions"
        )
    return (
        f"gcloud storage buckets add-iam-policy-binding gs://{bucket} "
        "--member=serviceAccount:EMAIL --role=projects/PROJECT/roles/swansongVm"
        "  # the role is packer/permissions/gcp-vm.yaml"
    )


def _of_azure(config: Config, error: StoreError) -> str:
    account, container, _ = account_container_and_prefix(config.store.url)
    if isinstance(error, NotFound):
        if is_providers_own(config):
            create = f"az storage container create --account-name {account} --name {container}"
            return f"{create} --auth-mode login"
        return f"# at {address(config)}, create the container {container}, or change store.url"
    if isinstance(error, Transient):
        return request_by_hand(config)
    if error.hint == auth.CREDENTIALS_HINT:
        return of_credentials(config, "")
    if not is_providers_own(config) or not isinstance(error, Forbidden):
        return "" if error.hint else request_by_hand(config)
    scope = (
        "/subscriptions/SUBSCRIPTION/resourceGroups/GROUP/providers/Microsoft.Storage/storageAccounts/"
        f"{account}/blobServices/default/containers/{container}"
    )
    return (
        "az role assignment create --role 'Storage Blob Data Contributor' "
        f"--assignee-principal-type ServicePrincipal --assignee-object-id ID --scope {scope}"
        "  # ID: az vm show --query identity.principalId"
    )


def put_lifecycle(config: Config, rules: Mapping[str, Any]) -> str:
    """Replace the lifecycle rules of the bucket."""
    bucket, _ = bucket_and_prefix(config.store.url)
    text = shlex.quote(json.dumps(rules))
    if _is_s3(config):
        command = f"aws s3api put-bucket-lifecycle-configuration --bucket {bucket}"
        return f"{aws(config, command)} --lifecycle-configuration {text}"
    return f"echo {text} | gcloud storage buckets update gs://{bucket} --lifecycle-file=/dev/stdin"


def of_versioning(config: Config) -> str:
    """Keep older versions of objects."""
    bucket, _ = bucket_and_prefix(config.store.url)
    if _is_s3(config):
        command = f"aws s3api put-bucket-versioning --bucket {bucket}"
        return f"{aws(config, command)} --versioning-configuration Status=Enabled"
    if not is_providers_own(config):
        return f"# at {address(config)}, turn on versioning for the bucket {bucket}"
    return f"gcloud storage buckets update gs://{bucket} --versioning"


def of_lock(config: Config) -> str:
    """Give the bucket retention of objects."""
    bucket, _ = bucket_and_prefix(config.store.url)
    if _is_s3(config):
        command = f"aws s3api put-object-lock-configuration --bucket {bucket}"
        enabled = "--object-lock-configuration ObjectLockEnabled=Enabled"
        return fixes.then(of_versioning(config), f"{aws(config, command)} {enabled}")
    if not is_providers_own(config):
        return f"# at {address(config)}, turn on object retention for the bucket {bucket}"
    return "gcloud storage buckets create gs://NEW --enable-per-object-retention"


def request_by_hand(config: Config) -> str:
    """Send a request to the store without Swansong, using the one tool that is always installed."""
    where = address(config) or "http://localhost"
    bundle = trusted(config) if where.startswith("https:") else None
    trust = f", context=s.create_default_context(cafile={bundle!r})" if bundle else ""
    program = f"import ssl as s, urllib.request as u; print(u.urlopen({where!r}, timeout=9{trust}).headers)"
    return f"{fixes.quoted(sys.executable)} -c {shlex.quote(program)}"


def of_credentials(config: Config, operator_file: str) -> str:
    """Give the daemon credentials: make files readable, install the operator's, or attach an identity.

    Args:
        operator_file: credentials in an operator's home, which the daemon does not read.
    """
    if _is_azure(config):
        if is_providers_own(config):
            return "az vm identity assign --resource-group GROUP --name VM"
        keys = fixes.drop_in("azure", "EnvironmentFile=/etc/swansong/azure.env")
        return f"{keys}  # the file has AZURE_STORAGE_KEY=, and only root may read it"
    files = _AWS_FILES if _is_s3(config) else _GCP_FILES
    for variable, default in files:
        path = Path(os.environ.get(variable) or default)
        if exists(path) and not os.access(path, os.R_OK, effective_ids=True):
            own = fixes.as_root(f"chown {DAEMON_USER}: {fixes.quoted(path)}")
            enter = fixes.as_root(f"chmod a+x {fixes.quoted(path.parent)}")
            read = fixes.as_root(f"chmod 0400 {fixes.quoted(path)}")
            return fixes.then(own, read, enter, fixes.restart())
    _, target = files[0]
    if operator_file:
        return _install(fixes.quoted(operator_file), target)
    if not is_providers_own(config):
        return _install("FILE", target) + "  # FILE: the credentials of this store"
    if _is_s3(config):
        return (
            "aws ec2 associate-iam-instance-profile --instance-id ID "
            "--iam-instance-profile Name=PROFILE"
        )
    return (
        "gcloud compute instances set-service-account VM --service-account=EMAIL "
        "--scopes=cloud-platform"
    )


def mount(root: Path) -> str:
    """Mount the file system of the store; empty if no configured mount is missing."""
    missing = mount_points.missing_mount(str(root))
    return fixes.as_root(f"mount {fixes.quoted(missing)}") if missing else ""


def _install(source: str, target: str) -> str:
    put = fixes.as_root(f"install -m 0400 -o {DAEMON_USER} {source} {target}")
    above = fixes.as_root(f"install -d {Path(target).parent}")
    return fixes.then(above, put, fixes.restart())


def _of_directory(root: Path, error: StoreError) -> str:
    if command := mount(root):
        return command
    number = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
    if number == errno.EROFS:
        point = staging.mount_of(root, mount_points.mounted()).point
        if point in ("/", str(root)):  # read-only in the sandbox, not on the file system
            return fixes.drop_in("store", f"ReadWritePaths={root}")
        return fixes.as_root(f"mount -o remount,rw {fixes.quoted(point)}")
    if number in (errno.ENOSPC, errno.EDQUOT):
        return staging.make_room(root, mount_points.mounted())
    if number is None and error.hint:
        return ""
    if not fixes.has_daemon_user():
        return fixes.directory(root, "0700")
    owner = fixes.as_root(f"chown -R {DAEMON_USER}: {fixes.quoted(root)}")
    return fixes.then(owner, fixes.as_root(f"chmod u+rwx {fixes.quoted(root)}"), fixes.restart())


def _is_s3(config: Config) -> bool:
    return config.store.url.startswith("s3://")


def _is_azure(config: Config) -> bool:
    return config.store.url.startswith("az://")


def aws(config: Config, command: str) -> str:
    """Add the options for the configured endpoint, region and CA bundle to an ``aws`` command."""
    options = {
        "--endpoint-url": config.store.endpoint,
        "--region": config.store.region,
        "--ca-bundle": config.store.ca_bundle,
    }
    named = [f"{name} {fixes.quoted(value)}" for name, value in options.items() if value]
    return " ".join([command, *named])
