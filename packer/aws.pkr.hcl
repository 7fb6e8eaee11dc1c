# SPDX-License-Identifier: Apache-2.0
# An AMI with the daemon enabled.

source "amazon-ebs" "swansong" {
  region        = var.aws_region
  subnet_id     = var.aws_subnet
  instance_type = var.aws_instance_type
  ami_name      = "${var.image_name}-${local.stamp}"

  source_ami_filter {
    filters = {
      name                = var.aws_source_image
      root-device-type    = "ebs"
      virtualization-type = "hvm"
    }
    owners      = [var.aws_source_owner]
    most_recent = true
  }

  ssh_username              = var.aws_ssh_username
  ssh_clear_authorized_keys = true

  tags = {
    Name = "${var.image_name}-${local.stamp}"
  }
}
