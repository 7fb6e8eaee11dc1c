# SPDX-License-Identifier: Apache-2.0
# One build for both clouds; `-only` picks one.

locals {
  stamp = formatdate("YYYYMMDD-hhmmss", timestamp())
}

build {
  sources = ["source.amazon-ebs.swansong", "source.googlecompute.swansong"]

  # The directories of the repository that provision.sh needs.
  provisioner "shell" {
    inline = ["mkdir -p /tmp/swansong/packer /tmp/swansong/wheelhouse"]
  }

  provisioner "file" {
    source      = "${path.root}/provision.sh"
    destination = "/tmp/swansong/packer/provision.sh"
  }

  provisioner "file" {
    source      = "${path.root}/package"
    destination = "/tmp/swansong/packer"
  }

  provisioner "file" {
    source      = "${path.root}/../constraints.txt"
    destination = "/tmp/swansong/constraints.txt"
  }

  provisioner "file" {
    source      = "${path.root}/../systemd"
    destination = "/tmp/swansong"
  }

  provisioner "file" {
    source      = "${var.wheelhouse}/"
    destination = "/tmp/swansong/wheelhouse"
  }

  provisioner "file" {
    source      = var.config_file
    destination = "/tmp/swansong/swansong.toml"
  }

  provisioner "shell" {
    inline = [
      "chmod +x /tmp/swansong/packer/package/*",
      "sudo bash /tmp/swansong/packer/provision.sh --image --wheelhouse /tmp/swansong/wheelhouse --config /tmp/swansong/swansong.toml --run '${var.run_name}' --store '${var.store_url}' --metrics '${var.metrics_listen}'",
      "rm -rf /tmp/swansong",
    ]
  }
}
